"""Other models for pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.support.tiny.family import HEADS, Tiny, layer_settings, of_class, shown
from tests.support.tiny.models import draw


def _krea2(_: Any, operations: Any) -> Any:
    from comfy.ldm.krea2.model import SingleStreamDiT

    return SingleStreamDiT(
        features=HEADS * 128,
        txtdim=40,
        heads=HEADS,
        kvheads=1,
        multiplier=4,
        layers=3,
        txtlayers=2,
        **layer_settings(operations),
    )


def _sd3(_: Any, operations: Any) -> Any:
    """3.5 medium, whose positions are a table in the file."""
    from comfy.ldm.modules.diffusionmodules.mmdit import OpenAISignatureMMDITWrapper

    model = OpenAISignatureMMDITWrapper(
        input_size=None, in_channels=16, depth=HEADS, pos_embed_max_size=8, num_patches=64, qk_norm="rms",
        adm_in_channels=2048, x_block_self_attn_layers=[0, 1],
        context_embedder_config={
            "target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": HEADS * 64}
        },
        **layer_settings(operations),
    )  # fmt: skip
    model.pos_embed.copy_(draw(*model.pos_embed.shape, seed=6))
    return model


HIDREAM: dict[str, Any] = {
    "attention_head_dim": 32,
    "num_attention_heads": HEADS,
    "axes_dims_rope": [16, 8, 8],
    "num_layers": 2,
    "num_single_layers": 2,
    "llama_layers": [0, 2, 1, 2],
}


ROPE = [8, 12, 12]
"""The channels of a head of 32."""


BOOGU: dict[str, Any] = {
    "num_attention_heads": 2 * HEADS,
    "num_kv_heads": HEADS,
    "multiple_of": 64,
    "axes_dim_rope": ROPE,
}


OMNIGEN2: dict[str, Any] = BOOGU | {
    "hidden_size": HEADS * 64,
    "num_layers": 2,
    "num_refiner_layers": 2,
    "text_feat_dim": 48,
    "timestep_scale": 1000.0,
}


ERNIE: dict[str, Any] = {
    "hidden_size": HEADS * 32,
    "num_attention_heads": HEADS,
    "num_layers": 3,
    "ffn_hidden_size": 256,
    "text_in_dim": 48,
    "rope_axes_dim": ROPE,
}


AURAFLOW: dict[str, Any] = {"dim": HEADS * 32, "n_heads": HEADS, "global_conddim": 64}


IDEOGRAM: dict[str, Any] = {
    "num_attention_heads": HEADS,
    "attention_head_dim": 32,
    "intermediate_size": 128,
    "adaln_dim": 32,
    "llm_features_dim": 48,
    "mrope_section": [6, 5, 5],
}


MAGE_FLOW: dict[str, Any] = {"num_attention_heads": HEADS, "attention_head_dim": 32, "axes_dims_rope": ROPE}
"""Sizes that ComfyUI takes for granted: a file says others, and families/test_large_classes.py has a ComfyUI that reads them."""


TINY: Mapping[str, Tiny] = {
    "lens": Tiny(
        of_class("lens.model.LensTransformer2DModel", num_layers=3, num_attention_heads=HEADS),
        (128, 5, 7),
        4 * 2880,
        shown,
    ),
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
    "hidream": Tiny(
        of_class(
            "hidream.model.HiDreamImageTransformer2DModel",
            patch_size=2,
            in_channels=16,
            caption_channels=[4096, 4096],
            **HIDREAM,
        ),
        (16, 10, 14),
        4096,
        lambda tokens: {"conditioning_llama3": draw(1, 3, tokens, 4096, seed=tokens)},
        pooled=2048,
        metadata={"sizes": json.dumps(HIDREAM)},
    ),
    "omnigen2": Tiny(
        of_class("omnigen.omnigen2.OmniGen2Transformer2DModel", **OMNIGEN2),
        (16, 9, 14),
        48,
        shown,
        metadata={"sizes": json.dumps(OMNIGEN2)},
    ),
    "boogu": Tiny(
        of_class(
            "boogu.model.BooguTransformer2DModel",
            hidden_size=HEADS * 64,
            num_layers=2,
            num_double_stream_layers=2,
            num_refiner_layers=1,
            instruction_feat_dim=48,
            **BOOGU,
        ),
        (16, 9, 14),
        48,
        shown,
        metadata={"sizes": json.dumps(BOOGU)},
    ),
    "ernie": Tiny(
        of_class("ernie.model.ErnieImageModel", **ERNIE), (128, 5, 7), 48, metadata={"sizes": json.dumps(ERNIE)}
    ),
    "auraflow": Tiny(
        of_class("aura.mmdit.MMDiT", n_layers=4, n_double_layers=2, max_seq=64, **AURAFLOW),
        (4, 9, 14),
        2048,
        metadata={"sizes": json.dumps(AURAFLOW)},
    ),
    "wide_auraflow": Tiny(
        of_class("aura.mmdit.MMDiT", "meta", n_layers=2, n_double_layers=1, max_seq=64), (4, 9, 14), 2048
    ),
    "ideogram": Tiny(
        of_class("ideogram4.model.Ideogram4Transformer2DModel", num_layers=3, **IDEOGRAM),
        (128, 5, 7),
        48,
        metadata={"sizes": json.dumps(IDEOGRAM)},
    ),
    "wide_ideogram": Tiny(
        of_class("ideogram4.model.Ideogram4Transformer2DModel", "meta", num_layers=1), (128, 5, 7), 53248
    ),
    "mage_flow": Tiny(
        of_class("mage_flow.model.MageFlowTransformer2DModel", num_layers=3, **MAGE_FLOW),
        (128, 5, 7),
        2560,
        metadata={"sizes": json.dumps(MAGE_FLOW)},
    ),
    "wide_mage_flow": Tiny(
        of_class("mage_flow.model.MageFlowTransformer2DModel", "meta", num_layers=1), (128, 5, 7), 2560
    ),
    "krea2": Tiny(_krea2, (16, 1, 9, 14), 80),
    "sd3": Tiny(_sd3, (16, 9, 14), 4096, pooled=2048),
}
