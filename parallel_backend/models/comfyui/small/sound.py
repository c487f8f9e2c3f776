"""ComfyUI's classes of models of video with sound, with random weights, and one call of each; see case.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .case import HEADS, TEXT, WIDTH, Builder, Case, Small, case, text
from .drawn import draw
from .videos import WEIGHED, guide_of


def _minimax(builder: Builder, payload: Mapping[str, Any], **others: Any) -> Case:
    model = builder.model("minimax.model.MiniMaxH3Model",
        hidden_size=WIDTH, num_layers=3, token_refiner_num_layers=2, num_attention_heads=HEADS, ffn_hidden_size=128,
        text_dim=TEXT, timestep_input_dim=32, time_embed_hidden_size=64, time_embed_dim=64, **others,
    )  # fmt: skip
    model.rope.inv_freq.copy_(100 ** -torch.linspace(0, 1, 16))
    latents = draw(1, 24, 3, 7, 10, seed=1), draw(1, 32, 2, 9, seed=2)
    if "adaln_curve_grid" in others:
        model.adaln_t_table.copy_(draw(*model.adaln_t_table.shape, seed=7))
    arguments = {"context": text(), "minimax_payload": payload}
    return replace(case("MiniMaxH3", model, latents, arguments, torch.tensor([600.0])), gathers=2)


def _ltxav(
    builder: Builder,
    arguments: Mapping[str, Any],
    timestep: Any,
    sound: int = 9,
    frames: int = 3,
    text_width: int = 2 * TEXT,
    **others: Any,
) -> Case:
    sizes = {"in_channels": 128, "cross_attention_dim": HEADS * 32, "attention_head_dim": 32, "num_attention_heads": HEADS,
             "audio_cross_attention_dim": 2 * 32, "audio_attention_head_dim": 32, "audio_num_attention_heads": 2,
             "caption_channels": TEXT, "num_layers": 3, "connector_attention_head_dim": 16, "connector_num_attention_heads": 3,
             "connector_num_layers": 1, "audio_connector_num_attention_heads": 3}  # fmt: skip
    model = builder.model("lightricks.av_model.LTXAVModel", **sizes | others)
    latents = [draw(1, 128, frames, 5, 4, seed=1), *([draw(1, 8, sound, 16, seed=2)] if sound else [])]
    prompt = {"context": draw(1, 7, text_width, seed=3), "attention_mask": None, "frame_rate": 24}
    return case("LTXAV", model, latents, {**prompt, **arguments}, timestep)


def _by_token(frames: int) -> Tensor:
    """A timestep for each of the video's tokens, each frame's its own."""
    return torch.linspace(0.1, 0.9, frames).repeat_interleave(20).view(1, -1, 1)


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
"""As MiniMaxH3ReferenceToVideo lists a picture, a video with its sound, one without and a sound."""

TWO_POINT_THREE: Mapping[str, Any] = {
    "cross_attention_adaln": True, "apply_gated_attention": True, "caption_proj_before_connector": True,
    "caption_projection_first_linear": False, "rope_type": "split", "use_middle_indices_grid": True,
    "connector_attention_head_dim": 32, "audio_connector_num_attention_heads": 2,
    "text_width": HEADS * 32 + 64,
}  # fmt: skip
REFERENCE = {"tokens": draw(1, 5, 128, seed=4)}
"""As LTXVReferenceAudio gives it."""

SOUND: Mapping[str, Small] = {
    "minimax-h3": lambda builder: _minimax(builder, {}),
    "minimax-h3, first frame and tagged text": lambda builder: _minimax(
        builder,
        {
            "text_token_tags": torch.tensor([1, 1, 0, 0, 1, 1, 1]),
            "keyframes": [{"latent": FRAME, "resolved_frame_index": 0}],
            "cond_video_latents": [FRAME],
            "visual_cond_noise_aug": 0.9,
            "seed": 3,
        },
    ),
    "minimax-h3, first and last frame": lambda builder: _minimax(
        builder,
        {
            "keyframes": [{"latent": FRAME, "resolved_frame_index": 0}, {"latent": LAST, "resolved_frame_index": 8}],
            "frame_count": 9,
            "cond_video_latents": [FRAME, LAST],
        },
    ),
    "minimax-h3, references with sound": lambda builder: _minimax(
        builder,
        {
            "refs": REFERENCES,
            "cond_video_latents": [each["latent"] for each in REFERENCES if "latent" in each],
            "cond_audio_latents": [each["audio_latent"] for each in REFERENCES if each.get("audio_latent") is not None],
            "audio_cond_noise_aug": 0.8,
        },
    ),
    "minimax-h3, curves": lambda builder: _minimax(builder, {}, adaln_curve_grid=16),
    "ltx-2": lambda builder: _ltxav(builder, {}, torch.tensor([0.6])),
    "ltx-2, video alone": lambda builder: _ltxav(builder, {}, torch.tensor([0.6]), sound=0),
    "ltx-2, a timestep a frame": lambda builder: _ltxav(
        builder, {}, (_by_token(3), torch.linspace(0.2, 0.8, 9).view(1, 9, 1))
    ),
    "ltx-2, weighed guide": lambda builder: _ltxav(
        builder, guide_of(**WEIGHED), (_by_token(4), torch.tensor([[[0.6]]])), frames=4
    ),
    "ltx-2, reference sound": lambda builder: _ltxav(builder, {"ref_audio": REFERENCE}, torch.tensor([0.6])),
    "ltx-2, neither hears the other": lambda builder: replace(
        _ltxav(builder, {}, torch.tensor([0.6])), options={"a2v_cross_attn": False, "v2a_cross_attn": False}
    ),
    "ltx-2, no picture from the sound": lambda builder: replace(
        _ltxav(builder, {}, torch.tensor([0.6])), options={"a2v_cross_attn": False}
    ),
    "ltx-2.3": lambda builder: _ltxav(builder, {}, torch.tensor([0.6]), **TWO_POINT_THREE),
    "ltx-2.3, reference sound, a timestep a frame": lambda builder: _ltxav(
        builder, {"ref_audio": REFERENCE}, (_by_token(3), torch.linspace(0.2, 0.8, 9).view(1, 9, 1)), **TWO_POINT_THREE
    ),
}
