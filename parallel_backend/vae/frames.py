"""Frames handed out while ComfyUI's own decoders make them, so that no rank holds the clip that they make.

Decoders of clips go through their latent a few frames at a time and join what came of it at the end, or write it into a
buffer. Here the layer that makes pixels gives them away and leaves no frames to join, and the buffer gives away what is
written into it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from .autoencoder import Give
from .rows import Slab

FRAMES = 8
"""Frames of a clip that are gathered and sent at a time; a few more where a decoder makes other numbers of them."""

LAST_LAYERS: Mapping[str, str] = MappingProxyType(
    {
        "comfy.ldm.wan.vae": "head.2",
        "comfy.ldm.wan.vae2_2": "head.2",
        "comfy.ldm.modules.diffusionmodules.model": "conv_out",
        "comfy.ldm.hunyuan_video.vae_refiner": "conv_out",
    }
)
"""Where ComfyUI defines a decoder of clips -> its layer after which frames are only joined, and put in order by `ORDER`."""

ORDER = "unpatchify"
"""What Wan 2.2's code calls to spread a square's pixels, which its decoder makes as channels, over rows and columns."""

SQUARE = 2
"""The side of such a square."""

SHAPE = "decode_output_shape"
"""What autoencoders have that write pixels into a buffer that they are given, LTX-Video's."""

Take = Callable[[Tensor], None]
"""Called with frames in order, `[1, 3, frames, height, width]`, or with a picture."""


def decode(module: Any, run: Callable[..., Tensor | None], take: Take, dims: int) -> None:
    """Decode by `run`; where ComfyUI's code makes a clip bit by bit, `take` gets it so, else whole at the end.

    Args:
        module: ComfyUI's autoencoder, whose `decode` is called by `run` with further arguments.
        dims: dimensions of the latent.
    """
    if hasattr(module, SHAPE):
        run(output_buffer=Buffer(take))
        return
    layer = LAST_LAYERS.get(type(module.decoder).__module__) if dims == 5 else None
    if layer is None:
        whole = run()
        assert whole is not None
        take(whole)
        return
    code = sys.modules[type(module).__module__]

    def give_away(_layer: nn.Module, _inputs: Any, frames: Tensor) -> Tensor:
        take(getattr(code, ORDER)(frames, patch_size=SQUARE) if hasattr(code, ORDER) else frames)
        return frames.new_empty((*frames.shape[:2], 0, *frames.shape[3:]))

    hook = module.decoder.get_submodule(layer).register_forward_hook(give_away)
    try:
        rest = run()
    finally:
        hook.remove()
    assert rest is None or not rest.shape[2]


class Buffer:
    """Stands in for the buffer that pixels are written into from the first frame on: what is written is given away."""

    def __init__(self, take: Take) -> None:
        self._take = take

    def __getitem__(self, _: Any) -> Buffer:
        return self

    def copy_(self, frames: Tensor) -> None:
        """The next frames."""
        self._take(frames)


class Batches:
    """Gives frames on, `FRAMES` or a few more at a time; a picture as it is."""

    def __init__(self, give: Give) -> None:
        self._give = give
        self._waiting: list[Slab] = []

    def add(self, slab: Slab) -> None:
        """The next frames, or a picture. A collective."""
        if slab.values.dim() == 4:
            self._give(slab)
            return
        for part in slab.values.split(FRAMES, dim=2):
            self._waiting.append(slab.with_values(part))
            if sum(slab.values.shape[2] for slab in self._waiting) >= FRAMES:
                self.flush()

    def flush(self) -> None:
        """Those that wait, if any do. A collective."""
        if self._waiting:
            values = torch.cat([slab.values for slab in self._waiting], dim=2)
            piece = self._waiting[0].with_values(values)
            self._waiting = []
            self._give(piece)
