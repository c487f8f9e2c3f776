"""MiniMax-H3's video autoencoder, small."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from parallel_backend.vae.frames import SHAPE
from tests.support.comfy_oracle import comfy_on_path
from tests.support.tiny.vae import random_weights

SETTINGS = {"ch": 32, "ch_mult": (1, 1, 1, 1, 1, 1), "num_res_blocks": 1} | {
    "clip_length": 5,
    "token_drop": 1,
    "tile_size": 48,
    "tile_overlap_min": 16,
}
"""Settings, with tiles of 3 x 3 values of the latent and two frames of it, which share one with the next ones."""


CLIPS = {"clip": ((1, 24, 5, 5, 4), 11), "picture": ((1, 24, 1, 7, 3), 1)}
"""Shapes of the latents of a video in eight tiles and of a picture in three, and their frames."""


def made() -> Any:
    """Return a small autoencoder. ComfyUI's loader would build one of full size, with 2.6 billion weights."""
    comfy_on_path()
    import comfy.ldm.minimax.vae as code

    module = code.MiniMaxH3VideoVAE(**SETTINGS)
    module.decoder = code.ViT3DDecoder(num_layers=2, heads=2)
    return module.eval()


@cache
def autoencoder(buffered: bool = False) -> Any:
    """Return the autoencoder with random weights; `buffered` is that of ComfyUI 0.33, or a stand-in for it in an older one.

    It writes decoded pixels into a buffer, its own in host memory or the caller's, in fp32 and from 0 to 1.
    """
    module = made()
    module.load_state_dict(random_weights(module, seed=0), strict=False)
    kind = type(module)
    if not buffered or hasattr(kind, SHAPE):
        return module

    def output_shape(_: Any, shape: torch.Size) -> tuple[int, ...]:
        (frames,) = (frames for latent, frames in CLIPS.values() if latent == tuple(shape))
        return (shape[0], 3, frames, *(16 * size for size in shape[3:]))

    def decode(self: Any, z: Tensor, output_buffer: Any = None) -> Any:
        pixels = kind.decode(self, z)
        buffer = torch.empty(pixels.shape, dtype=torch.float32) if output_buffer is None else output_buffer
        for frame in range(buffer.shape[2]):
            buffer[:, :, frame : frame + 1].copy_(pixels[:, :, frame : frame + 1] * 0.5 + 0.5)
        return buffer

    methods = {"decode": decode, SHAPE: output_shape, "__module__": kind.__module__}
    module.__class__ = type("Buffered", (kind,), methods)
    return module


def inputs(name: str) -> tuple[Tensor, Tensor]:
    """Return a latent, and pixels from -1 to 1."""
    (latent, frames), generator = CLIPS[name], torch.Generator().manual_seed(3)
    height, width = (16 * size for size in latent[-2:])
    return torch.randn(latent, generator=generator), torch.rand(
        1, 3, frames, height, width, generator=generator
    ) * 2 - 1
