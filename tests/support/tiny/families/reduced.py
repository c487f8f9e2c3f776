"""Tiny models of classes whose sizes ComfyUI assumes, and some of these classes at their real width."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tests.support.tiny.family import HEADS, ROPE, Tiny, of_class, padded, reduced, shown
from tests.support.tiny.models import draw

AURAFLOW: Mapping[str, Any] = {"dim": HEADS * 32, "n_heads": HEADS, "global_conddim": 64}
BOOGU: Mapping[str, Any] = {
    "num_attention_heads": 2 * HEADS,
    "num_kv_heads": HEADS,
    "multiple_of": 64,
    "axes_dim_rope": ROPE,
}
OMNIGEN2: Mapping[str, Any] = {
    **BOOGU,
    "hidden_size": HEADS * 64,
    "num_layers": 2,
    "num_refiner_layers": 2,
    "text_feat_dim": 48,
    "timestep_scale": 1000.0,
}
ERNIE: Mapping[str, Any] = {
    "hidden_size": HEADS * 32,
    "num_attention_heads": HEADS,
    "num_layers": 3,
    "ffn_hidden_size": 256,
    "text_in_dim": 48,
    "rope_axes_dim": ROPE,
}
HIDREAM: Mapping[str, Any] = {
    "attention_head_dim": 32,
    "num_attention_heads": HEADS,
    "axes_dims_rope": [16, 8, 8],
    "num_layers": 2,
    "num_single_layers": 2,
    "llama_layers": [0, 2, 1, 2],
}
IDEOGRAM: Mapping[str, Any] = {
    "num_attention_heads": HEADS,
    "attention_head_dim": 32,
    "intermediate_size": 128,
    "adaln_dim": 32,
    "llm_features_dim": 48,
    "mrope_section": [6, 5, 5],
}
LUMINA: Mapping[str, Any] = {
    "n_heads": HEADS,
    "n_kv_heads": 1,
    "axes_dims": [32, 32, 32],
    "axes_lens": [300, 512, 512],
    "rope_theta": 10000.0,
    "ffn_dim_multiplier": 1.0,
}
LUMINA_DETECTED: Mapping[str, Any] = {
    "patch_size": 2,
    "in_channels": 16,
    "n_layers": 2,
    "cap_feat_dim": 2304,
    "qk_norm": True,
}
MAGE_FLOW: Mapping[str, Any] = {"num_attention_heads": HEADS, "attention_head_dim": 32, "axes_dims_rope": ROPE}
MOCHI: Mapping[str, Any] = {
    "hidden_size_x": HEADS * 32,
    "hidden_size_y": 48,
    "depth": 3,
    "num_heads": HEADS,
    "mlp_ratio_x": 128.0,  # the class requires this width in its feed-forward layers
    "mlp_ratio_y": 2.0,
}
QWEN_IMAGE21: Mapping[str, Any] = {
    "num_attention_heads": HEADS,
    "attention_head_dim": 32,
    "axes_dims_rope": (8, 12, 12),
}
RADIANCE: Mapping[str, Any] = {"hidden_dim": 64, "n_layers": 1, "out_dim": HEADS * 128}
WIDE_RADIANCE: Mapping[str, Any] = {"hidden_dim": 5120, "n_layers": 5, "out_dim": 3072}


def radiance(heads: int) -> dict[str, Any]:
    """Return the settings of Chroma Radiance besides the sizes of its modulation."""
    return {
        "in_channels": 3, "out_channels": 3, "context_in_dim": 64, "hidden_size": heads * 128, "mlp_ratio": 4.0,
        "num_heads": heads, "depth": 1, "depth_single_blocks": 1, "axes_dim": [16, 56, 56], "theta": 10000, "patch_size": 16,
        "qkv_bias": True, "in_dim": 64, "txt_ids_dims": [], "vec_in_dim": None, "nerf_hidden_size": 64, "nerf_mlp_ratio": 4,
        "nerf_depth": 4, "nerf_max_freqs": 8, "nerf_tile_size": 512, "nerf_final_head_type": "conv",
        "nerf_embedder_dtype": torch.float32, "use_x0": False, "use_sequential_txt_ids": False,
    }  # fmt: skip


wide_radiance = of_class("chroma_radiance.model.ChromaRadiance", "meta", **radiance(24), **WIDE_RADIANCE)


TINY: Mapping[str, Tiny] = {
    "auraflow": reduced("aura.mmdit.MMDiT", AURAFLOW, (4, 9, 14), 2048, n_layers=4, n_double_layers=2, max_seq=64),
    "wide_auraflow": Tiny(
        of_class("aura.mmdit.MMDiT", "meta", n_layers=2, n_double_layers=1, max_seq=64), (4, 9, 14), 2048
    ),
    "boogu": reduced(
        "boogu.model.BooguTransformer2DModel",
        BOOGU,
        (16, 9, 14),
        48,
        shown,
        hidden_size=HEADS * 64,
        num_layers=2,
        num_double_stream_layers=2,
        num_refiner_layers=1,
        instruction_feat_dim=48,
    ),
    "omnigen2": reduced("omnigen.omnigen2.OmniGen2Transformer2DModel", OMNIGEN2, (16, 9, 14), 48, shown),
    "ernie": reduced("ernie.model.ErnieImageModel", ERNIE, (128, 5, 7), 48),
    "hidream": reduced(
        "hidream.model.HiDreamImageTransformer2DModel",
        HIDREAM,
        (16, 10, 14),
        4096,
        lambda tokens: {"conditioning_llama3": draw(1, 3, tokens, 4096, seed=tokens)},
        pooled=2048,
        patch_size=2,
        in_channels=16,
        caption_channels=[4096, 4096],
    ),
    "ideogram": reduced("ideogram4.model.Ideogram4Transformer2DModel", IDEOGRAM, (128, 5, 7), 48, num_layers=3),
    "wide_ideogram": Tiny(
        of_class("ideogram4.model.Ideogram4Transformer2DModel", "meta", num_layers=1), (128, 5, 7), 53248
    ),
    "lumina": reduced("lumina.model.NextDiT", LUMINA, (16, 9, 14), 2304, dim=HEADS * 96, **LUMINA_DETECTED),
    "wide_lumina": Tiny(
        of_class(
            "lumina.model.NextDiT",
            "meta",
            dim=2304,
            **LUMINA_DETECTED,
            **{**LUMINA, "n_heads": 24, "n_kv_heads": 8, "ffn_dim_multiplier": 4.0},
        ),
        (16, 9, 14),
        2304,
    ),
    "mage_flow": reduced("mage_flow.model.MageFlowTransformer2DModel", MAGE_FLOW, (128, 5, 7), 2560, num_layers=3),
    "wide_mage_flow": Tiny(
        of_class("mage_flow.model.MageFlowTransformer2DModel", "meta", num_layers=1), (128, 5, 7), 2560
    ),
    "mochi": reduced(
        "genmo.joint_model.asymm_models_joint.AsymmDiTJoint",
        MOCHI,
        (12, 3, 8, 10),
        4096,
        padded,
        patch_size=2,
        in_channels=12,
        learn_sigma=False,
        qk_norm=True,
        qkv_bias=False,
        posenc_preserve_area=True,
        timestep_scale=1000.0,
        use_t5=True,
    ),
    "qwen_image21": reduced(  # only in newer ComfyUI versions
        "qwen_image21.model.QwenImage21Transformer2DModel",
        QWEN_IMAGE21,
        (64, 7, 10),
        48,
        in_channels=64,
        out_channels=64,
        num_layers=3,
        context_in_dim=48,
    ),
    "radiance": reduced("chroma_radiance.model.ChromaRadiance", RADIANCE, (3, 80, 112), 64, **radiance(HEADS)),
    "wide_radiance": Tiny(wide_radiance, (3, 80, 112), 64),
}
