"""Any of ComfyUI's autoencoders that is declared, its own code over the rows of all ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.communicator import Communicator
from ..models.comfyui.autoencoder import Detected, detect, noise_scale
from ..weights.checkpoint import Checkpoint
from ..weights.keymap import KeyMap
from .autoencoder import Mark, whole_tensors
from .row_neighbours import attend
from .row_tensor import RowTensor
from .rows import Slab, slab_of
from .tiles import decoded_shape, has_tiles, in_tiles

FRAMES = 8
"""Frames of a clip that are gathered and sent at a time."""

ATTENTION = "optimized_attention"
"""Where ComfyUI's attention blocks keep the function that they call."""

SHAPE = "decode_output_shape"
"""What autoencoders have that write pixels into a buffer that they are given, LTX-Video's."""

CHUNK = "get_max_chunk_size"
"""What the code of these asks for the bytes it decodes at a time: by the memory of a rank's own device, so ranks agree on
the least, and have N times as much between them."""


class ComfyFamily:
    """Reads whatever files ComfyUI's Load VAE reads, of the declared classes."""

    imports: tuple[str, ...] = ()

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """By a decoder; which one is ComfyUI's to say."""
        return any(name.startswith("decoder.") for name in checkpoint.entries)

    def configure(self, checkpoint: Checkpoint) -> Detected:
        """By ComfyUI's detection."""
        return detect(checkpoint)

    def kind(self, config: Detected) -> str:
        """As declared."""
        return config.kind

    def dims(self, config: Detected) -> int:
        """A video's or a picture's."""
        return int(config.vae.latent_dim) + 2

    def channels(self, config: Detected) -> int:
        """Channels of a latent."""
        return int(config.vae.latent_channels)

    def keys(self, config: Detected, checkpoint: Checkpoint) -> KeyMap:
        """By ComfyUI's own conversion of names."""
        return whole_tensors(config.module, lambda name: config.names.get(name, name), checkpoint)

    def decoded_shape(self, config: Detected, latent: Sequence[int]) -> tuple[int, ...]:
        """By ComfyUI's formula of frames, which is not that of every clip in tiles."""
        if has_tiles(config.module):
            return decoded_shape(config.module, latent)
        vae, (batch, _, *frames, height, width) = config.vae, latent
        scale = vae.spacial_compression_decode()
        count = [vae.upscale_ratio[0](frames[0])] if frames else []
        return (batch, 3, *count, height * scale, width * scale)

    def build(self, config: Detected) -> ComfyAutoencoder:
        """The autoencoder on the meta device."""
        return ComfyAutoencoder(config.module, int(config.vae.spacial_compression_decode()))


class ComfyAutoencoder:
    """ComfyUI's module, run as it is: on one rank on tensors, on several on `RowTensor`s."""

    def __init__(self, module: nn.Module, scale: int) -> None:
        self.module = module
        self.scale = scale

    def decode(self, latent: Slab, schedule: str, mark: Mark) -> Iterator[Slab]:
        """The whole clip is decoded, each rank keeping its rows, and handed out some frames at a time.

        Noise that ComfyUI mixes into a latent is in it already.
        """
        return _pieces(self._run("decode", latent, mark))

    def encode(self, pixels: Slab, schedule: str, mark: Mark) -> Iterator[Slab]:
        """The means, in one piece."""
        yield self._run("encode", pixels, mark)

    def _run(self, method: str, given: Slab, mark: Mark) -> Slab:
        alone = given.axis.size == 1
        if not alone and has_tiles(self.module):
            return in_tiles(self.module, method, given, mark)
        values = given.values if alone else RowTensor.of(given)
        options = {}
        if method == "decode" and hasattr(self.module, SHAPE):
            options["output_buffer"] = _buffer(self.module.decode_output_shape(values.shape), values)  # type: ignore[operator]
        with ExitStack() as undo:

            def replace(owner: Any, name: str, value: Any) -> None:
                undo.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)

            if noise_scale(self.module):
                replace(self.module, "timestep_conditioning", False)  # its layers' own stays
            for module in self.module.modules():
                if isinstance(module, nn.Conv2d | nn.Conv3d):
                    undo.callback(module.register_forward_hook(lambda *_: mark()).remove)
                if not alone and hasattr(module, ATTENTION):
                    replace(module, ATTENTION, attend)
            code = sys.modules[type(self.module).__module__]
            if not alone and hasattr(code, CHUNK):
                size = _smallest(getattr(code, CHUNK)(given.values.device), given.axis)
                replace(code, CHUNK, lambda _: given.axis.size * size)
            out: Any = getattr(self.module, method)(values, **options)
        return Slab(out.local, out.runs, out.axis) if isinstance(out, RowTensor) else slab_of(out, given.axis)


def _buffer(shape: Sequence[int], latent: Tensor) -> Tensor:
    """Where pixels of a shape are written to, each rank's rows on its device."""
    if not isinstance(latent, RowTensor):
        return latent.new_empty(shape)
    times = shape[latent.along] // latent.shape[latent.along]
    runs = tuple(slice(run.start * times, run.stop * times) for run in latent.runs)
    mine = runs[latent.axis.rank]
    rows = latent.local.new_empty((*shape[: latent.along], mine.stop - mine.start, *shape[latent.along + 1 :]))
    return latent.like(rows, runs)


def _smallest(number: int, axis: Communicator) -> int:
    """Of all ranks' numbers. A collective."""
    numbers = axis.gather(torch.tensor([[[number]]], device=axis.device), [1] * axis.size)
    return int(numbers.min())


def _pieces(clip: Slab) -> Iterator[Slab]:
    values: Tensor = clip.values
    if values.dim() == 4:
        yield clip
        return
    for part in values.split(FRAMES, dim=2):
        yield clip.with_values(part)
