"""Frames passed on while ComfyUI's own decoders make them, so that no rank holds the whole decoded clip.

A decoder of clips goes through its latent a few frames at a time. At the end it joins the resulting frames, or it writes them
into a buffer on the way. Here a hook on the layer that makes pixels passes the frames on and leaves none to join. An object
stands in the buffer's place and passes on the frames that are written into it.
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
"""Number of frames of a clip that are gathered and sent at a time. If a decoder makes other numbers, a few more are sent."""

LAST_LAYERS: Mapping[str, str] = MappingProxyType(
    {
        "comfy.ldm.wan.vae": "head.2",
        "comfy.ldm.wan.vae2_2": "head.2",
        "comfy.ldm.modules.diffusionmodules.model": "conv_out",
        "comfy.ldm.hunyuan_video.vae_refiner": "conv_out",
    }
)
"""Module of ComfyUI that defines a decoder of clips -> the decoder's layer that makes pixels.

After this layer, ComfyUI only joins the frames and puts their pixels in order with `ORDER`.
"""

ORDER = "unpatchify"
"""Name of the function by which Wan 2.2's code spreads a square's pixels over rows and columns.

The decoder makes these pixels as channels.
"""

SQUARE = 2
"""Side of a square of `ORDER`, in pixels."""

SHAPE = "decode_output_shape"
"""Method of the autoencoders that write pixels into a buffer passed to them. It returns the shape of the pixels.

LTX-Video's have it, and MiniMax-H3's from ComfyUI 0.33 on.
"""

Take = Callable[[Tensor], None]
"""A callback that receives frames in order, `[1, 3, frames, height, width]`, or a picture."""


def decode(module: Any, run: Callable[..., Tensor | None], take: Take, shape: torch.Size) -> None:
    """Decode by `run` and pass the pixels to `take`: piece by piece where ComfyUI's code makes them so, else all at the end.

    Args:
        module: ComfyUI's autoencoder.
        run: calls the autoencoder's `decode`, with the given further arguments.
        shape: the shape of the latent, or of this rank's rows of it.
    """
    if hasattr(module, SHAPE):
        run(output_buffer=Buffer(take, torch.Size(getattr(module, SHAPE)(shape))))
        return
    layer = LAST_LAYERS.get(type(module.decoder).__module__) if len(shape) == 5 else None
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
    """An object in the place of the buffer into which a decoder writes its frames in order. It passes the frames on.

    Args:
        take: receives the frames.
        shape: the shape of the buffer. A decoder that makes more frames than this leaves out the last ones.
    """

    def __init__(self, take: Take, shape: torch.Size) -> None:
        self._take = take
        self.shape = shape

    def __getitem__(self, _: Any) -> Buffer:
        return self

    def copy_(self, frames: Tensor) -> None:
        """Pass on the next frames."""
        self._take(frames)


class Batches:
    """A queue that passes frames on, `FRAMES` or a few more at a time. It passes a picture on at once."""

    def __init__(self, give: Give) -> None:
        self._give = give
        self._waiting: list[Slab] = []

    def add(self, slab: Slab) -> None:
        """Add the next frames, or a picture. This is a collective."""
        if slab.values.dim() == 4:
            self._give(slab)
            return
        for part in slab.values.split(FRAMES, dim=2):
            self._waiting.append(slab.with_values(part))
            if sum(slab.values.shape[2] for slab in self._waiting) >= FRAMES:
                self.flush()

    def flush(self) -> None:
        """Pass on the frames that wait, if there are any. This is a collective."""
        if self._waiting:
            values = torch.cat([slab.values for slab in self._waiting], dim=2)
            piece = self._waiting[0].with_values(values)
            self._waiting = []
            self._give(piece)
