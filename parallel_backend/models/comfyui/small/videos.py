"""Small models of ComfyUI's video classes, with random weights and one call of each; see case.py."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..reduced import draw
from .case import AXES, HEADS, HIDING, TEXT, WIDTH, Builder, Example, Small, class_of, example, first_frame, seen, text


def _hunyuan(
    builder: Builder,
    kind: str,
    prompt: Mapping[str, Any],
    channels: int = 16,
    batch: int = 1,
    options: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> Example:
    sizes = {
        "in_channels": channels, "out_channels": 16, "vec_in_dim": 32, "context_in_dim": TEXT, "hidden_size": WIDTH,
        "mlp_ratio": 2.0, "num_heads": HEADS, "depth": 2, "depth_single_blocks": 2, "axes_dim": list(AXES), "theta": 256,
        "patch_size": [1, 2, 2], "qkv_bias": True, "guidance_embed": True, "byt5": False, "meanflow": False,
        "use_cond_type_embedding": False, "vision_in_dim": None, "meanflow_sum": False,
    }  # fmt: skip
    model = builder.model("hunyuan_video.model.HunyuanVideo", **sizes | settings)
    defaults = {
        "cross_attn": text(batch=batch),
        "pooled_output": draw(batch, 32, seed=3),
        "guidance": 6.0,
    }
    frames = [3] if len(model.patch_size) == 3 else []
    return example(kind, model, draw(batch, 16, *frames, 6, 10, seed=1), {**defaults, **prompt}, options=options)


def _ltxv(builder: Builder, prompt: Mapping[str, Any], frames: int = 3, **settings: Any) -> Example:
    sizes = {"in_channels": 128, "cross_attention_dim": WIDTH, "attention_head_dim": 32, "num_attention_heads": HEADS,
             "caption_channels": TEXT, "num_layers": 3}  # fmt: skip
    model = builder.model("lightricks.model.LTXVModel", **sizes | settings)
    x = draw(1, 128, frames, 5, 4, seed=1)
    defaults = {"cross_attn": text(), "attention_mask": torch.ones(1, 7, dtype=torch.long), "frame_rate": 24}
    return example("LTXV", model, x, {**defaults, **prompt})


WEIGHED = {"strength": 1.5, "pixel_mask": torch.linspace(-1, 2, 20).clamp(0, 1).view(1, 1, 1, 5, 4)}
"""A guide with attention weights above or below the video's, and with zero weight at some positions."""


def guide_of(**weighed: Any) -> dict[str, Any]:
    """Return prompt entries, as Add Guide makes them, for the last of four frames. By default its attention weight is 1."""
    entry = {"pre_filter_count": 20, "strength": 1.0, "pixel_mask": None, "latent_shape": [1, 5, 4]} | weighed
    return {
        "keyframe_idxs": torch.rand(1, 3, 20, 2, generator=torch.Generator().manual_seed(4)) * 8,
        "denoise_mask": by_frame(4),
        "guide_attention_entries": [entry],
    }


def _skyreels(builder: Builder, **prompt: Tensor) -> Example:
    return _hunyuan(
        builder, "HunyuanVideoSkyreelsI2V", {"concat_latent_image": draw(1, 16, 1, 6, 10, seed=5), **prompt}, 32
    )


def by_frame(frames: int) -> Tensor:
    """Return a mask that denoises each frame to another degree: `[1, 1, frames, 5, 4]`."""
    return torch.linspace(0.1, 0.9, frames).view(1, 1, frames, 1, 1).expand(1, 1, frames, 5, 4)


def _ltxv_keyframe(builder: Builder, **weighed: Any) -> Example:
    return _ltxv(builder, guide_of(**weighed), frames=4)


def _kandinsky(builder: Builder, prompt: Mapping[str, Any]) -> Example:
    model = builder.model("kandinsky5.model.Kandinsky5",
        in_text_dim=TEXT, in_text_dim2=32, time_dim=64, model_dim=HEADS * 64, ff_dim=256, visual_embed_dim=132,
        num_text_blocks=1, num_visual_blocks=3,
    )  # fmt: skip
    x = draw(1, 16, 3, 6, 10, seed=1)
    return example("Kandinsky5", model, x, {"cross_attn": text(), "pooled_output": draw(1, 32, seed=3), **prompt})


def _cosmos(
    builder: Builder, kind: str, channels: int, prompt: Mapping[str, Any] = MappingProxyType({}), frames: int = 3
) -> Example:
    model = builder.model("cosmos.predict2.MiniTrainDIT",
        max_img_h=240, max_img_w=240, max_frames=128, in_channels=channels, out_channels=16, patch_spatial=2,
        patch_temporal=1, model_channels=WIDTH, num_blocks=3, num_heads=HEADS, crossattn_emb_channels=TEXT,
        pos_emb_cls="rope3d", pos_emb_learnable=True, min_fps=1, max_fps=30, use_adaln_lora=True, adaln_lora_dim=16,

    )  # fmt: skip
    return example(kind, model, draw(1, 16, frames, 7, 10, seed=1), {"cross_attn": text(), **prompt})


def _anima(builder: Builder) -> Example:
    """Return an Anima whose text adapter is smaller than its class makes it."""
    model = _cosmos(builder, "CosmosT2IPredict2", 16, frames=1).model
    model.__class__ = class_of("anima.model.Anima")
    model.llm_adapter = builder.model(
        "anima.model.LLMAdapter",
        TEXT,
        TEXT,
        64,
        num_layers=1,
        num_heads=2,
    )
    token_inputs = {"t5xxl_ids": torch.arange(5), "t5xxl_weights": draw(5, seed=6)}
    return example("Anima", model, draw(1, 16, 1, 7, 10, seed=1), {"cross_attn": text(), **token_inputs})


def _camera(builder: Builder, kind: str, prompt: Mapping[str, Any], model_type: str) -> Example:
    model = builder.model("wan.model.CameraWanModel",
        model_type=model_type, dim=WIDTH, ffn_dim=256, text_dim=TEXT, num_heads=HEADS, num_layers=3, in_dim=32,
        in_dim_control_adapter=24,
    )  # fmt: skip
    camera = {"camera_conditions": draw(1, 24, 3, 64, 80, seed=5)}
    return example(kind, model, draw(1, 16, 3, 8, 10, seed=1), {"cross_attn": text(), **camera, **prompt})


def _mochi(builder: Builder) -> Example:
    """Return a Mochi. Its class fixes the inner width of its feed-forward layers."""
    model = builder.model("genmo.joint_model.asymm_models_joint.AsymmDiTJoint",
        patch_size=2, in_channels=12, hidden_size_x=WIDTH, hidden_size_y=TEXT, depth=3, num_heads=HEADS,
        mlp_ratio_x=128.0, mlp_ratio_y=2.0, use_t5=True, t5_feat_dim=TEXT, learn_sigma=False, timestep_scale=1000.0,
        qk_norm=True, qkv_bias=False,
    )  # fmt: skip
    mask = torch.tensor([[True] * 5 + [False] * 2])
    prompt = {"cross_attn": text(), "attention_mask": mask}
    return example("GenmoMochi", model, draw(1, 12, 3, 6, 10, seed=1), prompt)


FIFTEEN: Mapping[str, Any] = {
    "vec_in_dim": None, "patch_size": [1, 1, 1], "guidance_embed": False, "byt5": True, "use_cond_type_embedding": True,
    "vision_in_dim": 40, "meanflow_sum": True, "depth": 3, "depth_single_blocks": 0,
}  # fmt: skip
IMAGE: Mapping[str, Any] = {
    "vec_in_dim": None, "patch_size": [1, 1], "axes_dim": [16, 16], "guidance_embed": False, "byt5": True,
}  # fmt: skip
REFINER: Mapping[str, Any] = {"vec_in_dim": None, "patch_size": [1, 1, 1], "guidance_embed": False}
GLYPHS = draw(1, 3, 1472, seed=4)
GLYPHS_AND_PICTURE = {"conditioning_byt5small": GLYPHS, "clip_vision_output": seen(5, 5, 40)}
FIRST_FRAME = {"concat_latent_image": draw(1, 16, 3, 6, 10, seed=6), "concat_mask": first_frame(3, 6, 10)}


def _meanflow(builder: Builder) -> Example:
    """Return a meanflow model with a call at the second of three steps."""
    sigmas = {"sigmas": torch.tensor([0.6]), "sample_sigmas": torch.tensor([0.9, 0.6, 0.3, 0.0])}
    settings = {**FIFTEEN, "meanflow": True}
    return _hunyuan(builder, "HunyuanVideo15_SR_Distilled", GLYPHS_AND_PICTURE, 50, options=sigmas, **settings)


VIDEOS: Mapping[str, Small] = {
    "hunyuan video": lambda builder: _hunyuan(builder, "HunyuanVideo", {}, batch=2),
    "hunyuan video, masked text": lambda builder: _hunyuan(builder, "HunyuanVideo", {"attention_mask": HIDING}),
    "hunyuan video, first frame": lambda builder: _hunyuan(builder, "HunyuanVideoI2V", {"guiding_frame_index": 0}, 33),
    "hunyuan video, first frame and reference": lambda builder: _hunyuan(
        builder,
        "HunyuanVideo",
        {
            "guiding_frame_index": 0,
            "ref_latent": draw(1, 16, 1, 6, 10, seed=4),
            "attention_mask": HIDING,
        },
    ),
    "skyreels": _skyreels,
    "skyreels, masked text": lambda builder: _skyreels(builder, attention_mask=HIDING),
    "hunyuan video, first frame, masked text": lambda builder: _hunyuan(
        builder, "HunyuanVideoI2V", {"guiding_frame_index": 0, "attention_mask": HIDING, **FIRST_FRAME}, 33
    ),
    "hunyuan video 1.5, glyphs and picture": lambda builder: _hunyuan(
        builder,
        "HunyuanVideo15",
        GLYPHS_AND_PICTURE,
        33,
        **FIFTEEN,
    ),
    "hunyuan video 1.5, masked text and first frame": lambda builder: _hunyuan(
        builder, "HunyuanVideo15", {"attention_mask": HIDING, **FIRST_FRAME}, 33, **FIFTEEN
    ),
    "hunyuan video 1.5, meanflow": _meanflow,
    "hunyuan image, glyphs": lambda builder: _hunyuan(
        builder, "HunyuanImage21", {"conditioning_byt5small": GLYPHS}, **IMAGE
    ),
    "hunyuan image, masked text": lambda builder: _hunyuan(
        builder, "HunyuanImage21", {"attention_mask": HIDING}, **IMAGE
    ),
    "hunyuan image, refiner": lambda builder: _hunyuan(builder, "HunyuanImage21Refiner", {}, 32, **REFINER),
    "hunyuan image, refiner, masked text": lambda builder: _hunyuan(
        builder, "HunyuanImage21Refiner", {"attention_mask": HIDING}, 32, **REFINER
    ),
    "ltxv": lambda builder: _ltxv(builder, {}),
    "ltxv, masked text and a timestep a token": lambda builder: _ltxv(
        builder,
        {"attention_mask": HIDING, "denoise_mask": torch.linspace(0, 0.9, 60).view(1, 1, 3, 5, 4)},
        causal_temporal_positioning=True,
    ),
    "ltxv, guide": _ltxv_keyframe,
    "ltxv, weighed guide": lambda builder: _ltxv_keyframe(builder, **WEIGHED),
    "ltxv 2, modulated text": lambda builder: _ltxv(
        builder, {}, cross_attention_adaln=True, rope_type="split", use_middle_indices_grid=True
    ),
    "kandinsky 5": lambda builder: _kandinsky(builder, {}),
    "kandinsky 5, first frame": lambda builder: _kandinsky(
        builder, {"time_dim_replace": draw(1, 16, 1, 6, 10, seed=4)}
    ),
    "cosmos-predict2": lambda builder: _cosmos(builder, "CosmosT2IPredict2", 16, frames=1),
    "cosmos-predict2, a timestep a frame": lambda builder: _cosmos(
        builder, "CosmosI2VPredict2", 17, {"denoise_mask": first_frame(3, 7, 10)}
    ),
    "anima": _anima,
    "wan, camera": lambda builder: _camera(builder, "WAN21_Camera", {"clip_vision_output": seen()}, "camera"),
    "wan 2.2, camera": lambda builder: _camera(builder, "WAN22_Camera", {}, "camera_2.2"),
    "mochi, padded text": _mochi,
}
