"""Tiny models of pictures whose sizes ComfyUI detects, and Kandinsky 5 for pictures and videos."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.support.tiny.family import HEADS, Tiny, of_class, shown
from tests.support.tiny.models import draw


def _flux(**sizes: Any) -> Any:
    """Return a maker of FLUX's class, whose default sizes are LongCat-Image's and Ovis's."""
    defaults: dict[str, Any] = {
        "in_channels": 16, "out_channels": 16, "vec_in_dim": None, "hidden_size": HEADS * 128, "mlp_ratio": 4.0,
        "num_heads": HEADS, "depth": 2, "depth_single_blocks": 2, "axes_dim": [16, 56, 56], "theta": 10000, "patch_size": 2,
        "qkv_bias": True, "guidance_embed": False, "txt_ids_dims": [1, 2],
    }  # fmt: skip
    return of_class("flux.model.Flux", **defaults | sizes)


FLUX2: Mapping[str, Any] = {
    "in_channels": 128, "out_channels": 128, "context_in_dim": 48, "mlp_ratio": 3.0, "depth": 1, "axes_dim": [32, 32, 32, 32],
    "theta": 2000, "patch_size": 1, "qkv_bias": False, "guidance_embed": True, "txt_ids_dims": [3], "global_modulation": True,
    "mlp_silu_act": True, "ops_bias": False, "default_ref_method": "index", "ref_index_scale": 10.0,
}  # fmt: skip
KANDINSKY_LAYERS = (
    "visual_transformer_blocks.0.self_attention.to_query",
    "visual_transformer_blocks.1.cross_attention.to_value",
    "text_transformer_blocks.0.feed_forward.out_layer",
    "visual_embeddings.in_layer",
)
"""Layers that a LoRA changes in both models."""

KANDINSKY: Mapping[str, Any] = {"time_dim": 64, "ff_dim": 256, "num_text_blocks": 1}


def _sd3(_: Any, operations: Any) -> Any:
    """Return SD 3.5 medium, whose positions are a table in the file."""
    embedder = {"target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": HEADS * 64}}
    model = of_class(
        "modules.diffusionmodules.mmdit.OpenAISignatureMMDITWrapper",
        input_size=None,
        in_channels=16,
        depth=HEADS,
        pos_embed_max_size=8,
        num_patches=64,
        qk_norm="rms",
        adm_in_channels=2048,
        x_block_self_attn_layers=[0, 1],
        context_embedder_config=embedder,
    )(None, operations)
    model.pos_embed.copy_(draw(*model.pos_embed.shape, seed=6))
    return model


TINY: Mapping[str, Tiny] = {
    "flux2": Tiny(_flux(**FLUX2), (128, 7, 5), 48),
    "ovis": Tiny(_flux(context_in_dim=2048, yak_mlp=True, txt_norm=True), (16, 9, 14), 2048),
    "longcat": Tiny(_flux(context_in_dim=3584), (16, 9, 14), 3584),
    "joyimage": Tiny(
        of_class(
            "joyimage.model.JoyImageTransformer3DModel",
            hidden_size=HEADS * 128,
            num_attention_heads=HEADS,
            num_layers=3,
            theta=10000,
        ),
        (16, 1, 9, 14),
        4096,
    ),
    "kandinsky": Tiny(
        of_class("kandinsky5.model.Kandinsky5", model_dim=HEADS * 64, num_visual_blocks=3, **KANDINSKY),
        (16, 3, 8, 10),
        3584,
        pooled=768,
    ),
    "kandinsky_image": Tiny(
        of_class(
            "kandinsky5.model.Kandinsky5",
            "meta",
            model_dim=2560,
            visual_embed_dim=64,
            num_visual_blocks=2,
            axes_dims=(32, 48, 48),
            rope_scale_factor=(1.0, 1.0, 1.0),
            **KANDINSKY,
        ),
        (16, 10, 14),
        3584,
        pooled=768,
    ),
    "krea2": Tiny(
        of_class(
            "krea2.model.SingleStreamDiT",
            features=HEADS * 128,
            txtdim=40,
            heads=HEADS,
            kvheads=1,
            multiplier=4,
            layers=3,
            txtlayers=2,
        ),
        (16, 1, 9, 14),
        80,
    ),
    "lens": Tiny(
        of_class("lens.model.LensTransformer2DModel", num_layers=3, num_attention_heads=HEADS),
        (128, 5, 7),
        4 * 2880,
        shown,
    ),
    "sd3": Tiny(_sd3, (16, 9, 14), 4096, pooled=2048),
}
