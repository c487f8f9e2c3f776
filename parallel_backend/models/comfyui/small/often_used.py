"""Small models of FLUX, Chroma, Qwen-Image, Wan, VACE, Lumina 2 and Z-Image, with one call of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..reduced import draw
from .case import AXES, HEADS, HIDING, TEXT, WIDTH, Builder, Example, Small, example, first_frame, seen, text


def _flux(builder: Builder, references: str = "") -> Example:
    model = builder.model("flux.model.Flux",
        in_channels=16, out_channels=16, vec_in_dim=32, context_in_dim=TEXT, hidden_size=WIDTH, mlp_ratio=2.0,
        num_heads=HEADS, depth=2, depth_single_blocks=2, axes_dim=list(AXES), theta=10000, patch_size=2, qkv_bias=True,
        guidance_embed=True, txt_ids_dims=[],
    )  # fmt: skip
    prompt: dict[str, Any] = {
        "cross_attn": text(batch=2),
        "pooled_output": draw(2, 32, seed=3),
        "guidance": 4.0,
    }
    if references:
        prompt |= {
            "reference_latents": [draw(2, 16, 6, 5, seed=4), draw(2, 16, 3, 4, seed=5)],
            "reference_latents_method": references,
        }
    return example("Flux", model, draw(2, 16, 9, 14, seed=1), prompt)


def _flux2(builder: Builder, method: str = "") -> Example:
    model = builder.model("flux.model.Flux",
        in_channels=16, out_channels=16, vec_in_dim=None, context_in_dim=TEXT, hidden_size=WIDTH, mlp_ratio=2.0,
        num_heads=HEADS, depth=1, depth_single_blocks=2, axes_dim=[8, 8, 8, 8], theta=2000, patch_size=1,
        qkv_bias=False, guidance_embed=True, txt_ids_dims=[3], global_modulation=True, mlp_silu_act=True, ops_bias=False,
        default_ref_method="index", ref_index_scale=10.0,
    )  # fmt: skip
    prompt: dict[str, Any] = {"cross_attn": text(), "guidance": 4.0}
    if method:
        prompt |= {"reference_latents": [draw(1, 16, 4, 5, seed=4)], "reference_latents_method": method}
    return example("Flux2", model, draw(1, 16, 7, 5, seed=1), prompt)


def _chroma(builder: Builder) -> Example:
    model = builder.model("chroma.model.Chroma",
        in_channels=64, out_channels=64, context_in_dim=TEXT, hidden_size=WIDTH, mlp_ratio=2.0, num_heads=HEADS,
        depth=1, depth_single_blocks=2, axes_dim=list(AXES), theta=10000, patch_size=2, qkv_bias=True, in_dim=64,
        out_dim=WIDTH, hidden_dim=64, n_layers=1, txt_ids_dims=[], vec_in_dim=None,
    )  # fmt: skip
    return example("Chroma", model, draw(1, 16, 9, 14, seed=1), {"cross_attn": text()})


def _radiance(builder: Builder) -> Example:
    model = builder.model("chroma_radiance.model.ChromaRadiance",
        in_channels=3, out_channels=3, context_in_dim=TEXT, hidden_size=WIDTH, mlp_ratio=2.0, num_heads=HEADS, depth=1,
        depth_single_blocks=2, axes_dim=list(AXES), theta=10000, patch_size=4, qkv_bias=True, in_dim=64,
        out_dim=WIDTH, hidden_dim=64, n_layers=1, txt_ids_dims=[], vec_in_dim=None, nerf_hidden_size=16,
        nerf_mlp_ratio=2, nerf_depth=2, nerf_max_freqs=4, nerf_tile_size=8, nerf_final_head_type="conv",
        nerf_embedder_dtype=torch.float32, use_x0=False, use_sequential_txt_ids=True,
    )  # fmt: skip
    return example("ChromaRadiance", model, draw(1, 3, 18, 23, seed=1), {"cross_attn": text()})


def _qwen(builder: Builder, masked: bool = False, method: str = "") -> Example:
    model = builder.model("qwen_image.model.QwenImageTransformer2DModel",
        num_layers=3, attention_head_dim=WIDTH // HEADS, num_attention_heads=HEADS, joint_attention_dim=TEXT,
        axes_dims_rope=AXES,
    )  # fmt: skip
    prompt: dict[str, Any] = {"cross_attn": text()}
    if masked:
        prompt["attention_mask"] = HIDING
    if method:
        prompt |= {
            "reference_latents": [draw(1, 16, 1, 6, 5, seed=4), draw(1, 16, 1, 3, 4, seed=5)],
            "reference_latents_method": method,
        }
    return example("QwenImage", model, draw(1, 16, 1, 9, 14, seed=1), prompt)


def wan(
    builder: Builder,
    kind: str,
    prompt: Mapping[str, Any],
    height: int = 7,
    **settings: Any,
) -> Example:
    """Return a Wan model with a call on three frames of `height` x 10."""
    sizes = {"in_dim": 16, "dim": WIDTH, "ffn_dim": 256, "text_dim": TEXT, "num_heads": HEADS, "num_layers": 3}
    model = builder.model("wan.model.WanModel", **sizes | settings)
    return example(kind, model, draw(1, 16, 3, height, 10, seed=1), {"cross_attn": text(), **prompt})


def _vace(builder: Builder) -> Example:
    model = builder.model(
        "wan.model.VaceWanModel",
        dim=WIDTH,
        ffn_dim=256,
        text_dim=TEXT,
        num_heads=HEADS,
        num_layers=4,
        vace_layers=2,
        vace_in_dim=96,
    )
    prompt: dict[str, Any] = {"cross_attn": text(), "vace_strength": [1.0, 0.5]}
    prompt |= {
        "vace_frames": [draw(1, 32, 3, 8, 10, seed=4), draw(1, 32, 3, 8, 10, seed=5)],
        "vace_mask": [draw(1, 64, 3, 8, 10, seed=6), draw(1, 64, 3, 8, 10, seed=7)],
    }
    return example("WAN21_Vace", model, draw(1, 16, 3, 8, 10, seed=1), prompt)


def _lumina(builder: Builder, kind: str, prompt: Mapping[str, Any], **settings: Any) -> Example:
    sizes = {
        "patch_size": 2, "in_channels": 16, "dim": WIDTH, "n_layers": 2, "n_refiner_layers": 2, "n_heads": HEADS,
        "multiple_of": 64, "ffn_dim_multiplier": 2.0, "qk_norm": True, "cap_feat_dim": TEXT, "axes_dims": list(AXES),
        "axes_lens": [300, 512, 512],
    }  # fmt: skip
    model = builder.model("lumina.model.NextDiT", **sizes | settings)
    return example(kind, model, draw(1, 16, 9, 14, seed=1), {"cross_attn": text(), **prompt})


Z_IMAGE: Mapping[str, Any] = {
    "dim": HEADS * 96,  # Z-Image's modulation needs a width of at least 256
    "axes_dims": [32, 32, 32],
    "n_kv_heads": HEADS,
    "rope_theta": 256.0,
    "z_image_modulation": True,
    "time_scale": 1000.0,
    "pad_tokens_multiple": 32,
}

OFTEN_USED: Mapping[str, Small] = {
    "flux": _flux,
    "flux, references": lambda builder: _flux(builder, "offset"),
    "flux, references by index": lambda builder: _flux(builder, "index"),
    "flux 2": _flux2,
    "flux 2, zero-timestep reference": lambda builder: _flux2(builder, "index_timestep_zero"),
    "chroma": _chroma,
    "chroma radiance": _radiance,
    "qwen-image": _qwen,
    "qwen-image, masked text": lambda builder: _qwen(builder, masked=True),
    "qwen-image-edit, references": lambda builder: _qwen(builder, method="index"),
    "qwen-image-edit, zero-timestep references": lambda builder: _qwen(
        builder, masked=True, method="index_timestep_zero"
    ),
    "qwen-image-edit, negative index": lambda builder: _qwen(builder, method="negative_index"),
    "wan, text": lambda builder: wan(builder, "WAN21_T2V", {}),
    "wan, image": lambda builder: wan(
        builder,
        "WAN21_I2V",
        {
            "clip_vision_output": seen(),
            "concat_latent_image": draw(1, 16, 3, 7, 10, seed=5),
            "concat_mask": first_frame(3, 7, 10),
        },
        model_type="i2v",
        in_dim=36,
    ),
    "wan, reference frame": lambda builder: wan(
        builder,
        "WAN21_FunControl2V",
        {"reference_latents": [draw(1, 16, 1, 8, 10, seed=4)]},
        height=8,
        in_dim_ref_conv=16,
    ),
    "wan 2.2, a timestep a frame": lambda builder: wan(builder, "WAN22_T2V", {"denoise_mask": first_frame(3, 7, 10)}),
    "vace, two controls": _vace,
    "lumina 2, grouped heads": lambda builder: _lumina(builder, "Lumina2", {}, n_kv_heads=1),
    "z-image": lambda builder: _lumina(builder, "ZImage", {}, **Z_IMAGE),
    "z-image, masked text": lambda builder: _lumina(builder, "ZImage", {"attention_mask": HIDING}, **Z_IMAGE),
    "z-image, reference": lambda builder: _lumina(
        builder,
        "ZImage",
        {"reference_latents": [draw(1, 16, 6, 4, seed=4)], "reference_latents_text_embeds": [draw(1, 5, TEXT, seed=5)]},
        **Z_IMAGE,
    ),
}
