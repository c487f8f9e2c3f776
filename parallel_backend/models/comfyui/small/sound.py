"""Small models of ComfyUI's classes for video with sound, with random weights and one call of each; see case.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..reduced import draw
from .case import HEADS, HIDING, TEXT, WIDTH, Builder, Example, Small, example, first_frame, text
from .videos import WEIGHED, by_frame, guide_of


def _minimax(builder: Builder, prompt: Mapping[str, Any], **settings: Any) -> Example:
    model = builder.model("minimax.model.MiniMaxH3Model",
        hidden_size=WIDTH, num_layers=3, token_refiner_num_layers=2, num_attention_heads=HEADS, ffn_hidden_size=128,
        text_dim=TEXT, timestep_input_dim=32, time_embed_hidden_size=64, time_embed_dim=64, **settings,
    )  # fmt: skip
    model.rope.inv_freq.copy_(100 ** -torch.linspace(0, 1, 16))
    latents = draw(1, 24, 3, 7, 10, seed=1), draw(1, 32, 2, 9, seed=2)
    if "adaln_curve_grid" in settings:
        model.adaln_t_table.copy_(draw(*model.adaln_t_table.shape, seed=7))
    return example("MiniMaxH3", model, latents, {"cross_attn": text(), **prompt}, gathers=2)


def _ltxav(
    builder: Builder,
    prompt: Mapping[str, Any],
    sound: int = 9,
    frames: int = 3,
    text_width: int = 2 * TEXT,
    options: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> Example:
    sizes = {"in_channels": 128, "cross_attention_dim": HEADS * 32, "attention_head_dim": 32, "num_attention_heads": HEADS,
             "audio_cross_attention_dim": 2 * 32, "audio_attention_head_dim": 32, "audio_num_attention_heads": 2,
             "caption_channels": TEXT, "num_layers": 3, "connector_attention_head_dim": 16, "connector_num_attention_heads": 3,
             "connector_num_layers": 1, "audio_connector_num_attention_heads": 3}  # fmt: skip
    model = builder.model("lightricks.av_model.LTXAVModel", **sizes | settings)
    latents = [draw(1, 128, frames, 5, 4, seed=1), *([draw(1, 8, sound, 16, seed=2)] if sound else [])]
    defaults = {"cross_attn": draw(1, 7, text_width, seed=3), "frame_rate": 24}
    return example("LTXAV", model, latents, {**defaults, **prompt}, options=options)


def _masks(frames: int) -> list[Tensor]:
    """Return a mask for the video that denoises each frame to another degree, and a mask for the sound."""
    return [by_frame(frames), torch.linspace(0.3, 1, 9).view(1, 1, 9, 1).expand(1, 8, 9, 16)]


FRAME = draw(1, 24, 1, 8, 10, seed=5)
LAST = draw(1, 24, 1, 8, 10, seed=6)
REFERENCES: Sequence[Mapping[str, Any]] = (
    {"kind": "image", "latent_h": 6, "latent_w": 4, "latent": draw(1, 24, 1, 6, 4, seed=8)},
    {"kind": "video_audio", "latent_t": 2, "latent_h": 4, "latent_w": 6, "latent": draw(1, 24, 2, 4, 6, seed=9),
     "ref_audio_t": 3, "audio_latent": draw(1, 32, 2, 3, seed=10)},
    {"kind": "video", "latent_t": 2, "latent_h": 2, "latent_w": 4, "latent": draw(1, 24, 2, 2, 4, seed=11),
     "ref_audio_t": 0, "audio_latent": None},
    {"kind": "audio", "ref_audio_t": 5, "audio_latent": draw(1, 32, 2, 5, seed=12)},
)  # fmt: skip
"""References as MiniMaxH3ReferenceToVideo lists them: a picture, a video with sound, a video without, and a sound."""

TWO_POINT_THREE: Mapping[str, Any] = {
    "cross_attention_adaln": True, "apply_gated_attention": True, "caption_proj_before_connector": True,
    "caption_projection_first_linear": False, "rope_type": "split", "use_middle_indices_grid": True,
    "connector_attention_head_dim": 32, "audio_connector_num_attention_heads": 2,
    "text_width": HEADS * 32 + 64,
}  # fmt: skip
REFERENCE = {"tokens": draw(1, 5, 128, seed=4)}
"""A reference sound as LTXVReferenceAudio adds it."""

SOUND: Mapping[str, Small] = {
    "minimax-h3": lambda builder: _minimax(builder, {}),
    "minimax-h3, first frame and tagged text": lambda builder: _minimax(
        builder,
        {
            "minimax_token_tags": torch.tensor([1, 1, 0, 0, 1, 1, 1]),
            "minimax_keyframes": [{"latent": FRAME, "resolved_frame_index": 0}],
            "minimax_visual_cond_noise_aug": 0.9,
            "seed": 3,
        },
    ),
    "minimax-h3, first and last frame": lambda builder: _minimax(
        builder,
        {
            "minimax_keyframes": [
                {"latent": FRAME, "resolved_frame_index": 0},
                {"latent": LAST, "resolved_frame_index": 8},
            ],
            "minimax_frame_count": 9,
        },
    ),
    "minimax-h3, references with sound": lambda builder: _minimax(
        builder,
        {
            "minimax_refs": [*REFERENCES],
            "minimax_audio_cond_noise_aug": 0.8,
        },
    ),
    "minimax-h3, masked": lambda builder: _minimax(
        builder, {"denoise_mask": [first_frame(3, 7, 10), torch.tensor([0.0] * 3 + [1.0] * 6).view(1, 1, 1, 9)]}
    ),
    "minimax-h3, curves": lambda builder: _minimax(builder, {}, adaln_curve_grid=16),
    "ltx-2": lambda builder: _ltxav(builder, {}),
    "ltx-2, video alone": lambda builder: _ltxav(builder, {}, sound=0),
    "ltx-2, a timestep a frame": lambda builder: _ltxav(builder, {"denoise_mask": _masks(3)}),
    "ltx-2, weighed guide": lambda builder: _ltxav(
        builder, {**guide_of(**WEIGHED), "denoise_mask": _masks(4)}, frames=4
    ),
    "ltx-2, masked text": lambda builder: _ltxav(builder, {"attention_mask": HIDING}),
    "ltx-2, reference sound": lambda builder: _ltxav(builder, {"ref_audio": REFERENCE}),
    "ltx-2, neither hears the other": lambda builder: _ltxav(
        builder, {}, options={"a2v_cross_attn": False, "v2a_cross_attn": False}
    ),
    "ltx-2, no picture from the sound": lambda builder: _ltxav(builder, {}, options={"a2v_cross_attn": False}),
    "ltx-2.3": lambda builder: _ltxav(builder, {}, **TWO_POINT_THREE),
    "ltx-2.3, reference sound, a timestep a frame": lambda builder: _ltxav(
        builder, {"ref_audio": REFERENCE, "denoise_mask": _masks(3)}, **TWO_POINT_THREE
    ),
}
