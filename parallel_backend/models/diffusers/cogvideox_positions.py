"""Positions of CogVideoX's tokens: rotary positions as in diffusers' pipeline, and absolute ones, some of them learned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .cogvideox_keys import PATCH

SAMPLE = (60, 90)
"""Height and width of the latents that the 1.0 models were trained on. Their rotary positions are fitted to this size."""

LEARNED_FRAMES = 13
LEARNED_TEXT = 226
LEARNED = LEARNED_TEXT + LEARNED_FRAMES * (SAMPLE[0] // PATCH) * (SAMPLE[1] // PATCH)
"""The number of learned positions of 5b image to video: text, and a video of the size SAMPLE."""


def rotary(head_dim: int, patch_frames: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines `[tokens, head_dim]` as in diffusers' pipeline.

    In 1.0 models, positions are those of a crop that is fitted to the size of the training.

    Args:
        x: a padded latent `[batch, frames, channels, height, width]`.
    """
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    grid = x.shape[3] // PATCH, x.shape[4] // PATCH
    crop = None if patch_frames > 1 else _crop(*grid)
    cosines, sines = get_3d_rotary_pos_embed(
        head_dim,
        crop,
        grid,
        x.shape[1] // patch_frames,
        grid_type="linspace" if crop else "slice",
        max_size=grid,
        device=x.device,
    )
    return cosines, sines


def _crop(rows: int, columns: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the first position of a grid and the position after its last, with the grid fitted into SAMPLE's."""
    height, width = (size // PATCH for size in SAMPLE)
    if rows / columns > height / width:
        fitted = height, round(height / rows * columns)
    else:
        fitted = round(width / columns * rows), width
    top_row, left_column = round((height - fitted[0]) / 2), round((width - fitted[1]) / 2)
    return (top_row, left_column), (top_row + fitted[0], left_column + fitted[1])


@contextmanager
def positions_for(embed: Any, text: int) -> Iterator[None]:
    """Make absolute positions fit `text` tokens of text while this context is active.

    Learned positions of text are cut, or padded with zeros.
    """
    embed.max_text_seq_length = text
    learned = embed._parameters.get("pos_embedding")
    if learned is not None and text != LEARNED_TEXT:
        text_positions, picture = learned[:, :LEARNED_TEXT], learned[:, LEARNED_TEXT:]
        # Python finds this attribute before the parameter of the same name.
        embed.__dict__["pos_embedding"] = torch.cat(
            [F.pad(text_positions, (0, 0, 0, text - LEARNED_TEXT)), picture], dim=1
        )
    try:
        yield
    finally:
        embed.__dict__.pop("pos_embedding", None)
