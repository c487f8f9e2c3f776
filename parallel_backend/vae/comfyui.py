"""ComfyUI's autoencoders of all declared classes, run by ComfyUI's own code over the rows of all ranks."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.communicator import Communicator
from ..models.comfyui.autoencoder import Detected, detect, noise_scale
from ..weights.files.checkpoint import Checkpoint
from ..weights.files.keymap import KeyMap
from . import frames
from .autoencoder import Give, OnProgress, whole_tensors, without_encoder
from .row_neighbours import attend
from .row_rules import RULES
from .row_tensor import RowTensor
from .rows import Slab, slab_of
from .tiles import decoded_shape, has_tiles, in_tiles

ATTENTION = "optimized_attention"
"""Attribute of ComfyUI's attention blocks that holds the function they call."""

CHUNK = "get_max_chunk_size"
"""Name of the function that gives LTX-Video's code the number of bytes to decode at a time.

The function goes by the memory of a rank's own device. The ranks agree on the smallest number, and all N ranks together decode
N times as many bytes.
"""


class ComfyAutoencoderFamily:
    """The family of all files that ComfyUI's Load VAE reads and whose class is declared."""

    imports: tuple[str, ...] = ()

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """Return True if the file has a decoder. ComfyUI decides which decoder it is."""
        return any(name.startswith("decoder.") for name in checkpoint.entries)

    def configure(self, checkpoint: Checkpoint) -> Detected:
        """Return the autoencoder that ComfyUI detects in the file."""
        detected = detect(checkpoint)
        missing = without_encoder(detected.module, lambda name: detected.names.get(name, name), checkpoint)
        return dataclasses.replace(detected, missing=missing)

    def kind(self, config: Detected) -> str:
        """Return ComfyUI's name of the decoder that it detected."""
        return config.kind

    def dims(self, config: Detected) -> int:
        """Return the number of dimensions of a latent, which is a video's or a picture's."""
        return int(config.vae.latent_dim) + 2

    def channels(self, config: Detected) -> int:
        """Return the number of channels of a latent."""
        return int(config.vae.latent_channels)

    def missing(self, config: Detected) -> str:
        """Return the first tensor that encoding needs and the file lacks. ComfyUI warns of it and encodes without it."""
        return config.missing

    def keys(self, config: Detected, checkpoint: Checkpoint) -> KeyMap:
        """Return the key map, made by ComfyUI's own conversion of names."""
        return whole_tensors(config.module, lambda name: config.names.get(name, name), checkpoint)

    def decoded_shape(self, config: Detected, latent: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the pixels of a latent.

        ComfyUI's formula gives the number of frames. The formula is wrong for some clips in tiles, so tiles give their own
        shape.
        """
        if has_tiles(config.module):
            return decoded_shape(config.module, latent)
        vae, (batch, _, *frames, height, width) = config.vae, latent
        scale = vae.spacial_compression_decode()
        count = [vae.upscale_ratio[0](frames[0])] if frames else []
        channels = getattr(vae, "conv_out_channels", vae.output_channels)  # Wan 2.1's channels depend on the file
        return (batch, channels, *count, height * scale, width * scale)

    def build(self, config: Detected) -> ComfyAutoencoder:
        """Return the autoencoder on the meta device."""
        return ComfyAutoencoder(config.module, int(config.vae.spacial_compression_decode()))


class ComfyAutoencoder:
    """A module of ComfyUI's that runs unchanged: on tensors on one rank, on `RowTensor`s on several."""

    def __init__(self, module: nn.Module, scale: int) -> None:
        self.module = module
        self.scale = scale

    def decode(self, latent: Slab, schedule: str, on_progress: OnProgress, give: Give) -> None:
        """Decode a latent and pass its frames to `give`. Each rank keeps its rows of the few frames in progress.

        The latent already contains any noise that ComfyUI mixes into it.
        """
        batches = frames.Batches(give)
        if self._in_turns(latent):
            batches.add(in_tiles(self.module, "decode", latent, on_progress))
        else:
            frames.decode(
                self.module,
                lambda **options: self._run("decode", latent, on_progress, **options),
                lambda decoded: batches.add(_rows(decoded, latent.axis)),
                latent.values.shape,
            )
        batches.flush()

    def encode(self, pixels: Slab, schedule: str, on_progress: OnProgress) -> Iterator[Slab]:
        """Yield the means in one piece."""
        if self._in_turns(pixels):
            yield in_tiles(self.module, "encode", pixels, on_progress)
        else:
            yield _rows(self._run("encode", pixels, on_progress), pixels.axis)

    def _in_turns(self, slab: Slab) -> bool:
        """Return True if ranks take turns at whole tiles."""
        return slab.axis.size > 1 and has_tiles(self.module)

    def _run(self, method: str, slab: Slab, on_progress: OnProgress, **options: Any) -> Any:
        """Return the result of ComfyUI's method, on the rows of all ranks or on a plain tensor on one rank."""
        alone = slab.axis.size == 1
        values = slab.values if alone else RowTensor.of(slab, RULES)
        with ExitStack() as undo:

            def replace(owner: Any, name: str, value: Any) -> None:
                undo.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)

            if noise_scale(self.module):
                replace(self.module, "timestep_conditioning", False)  # its layers keep their own setting
            for module in self.module.modules():
                if isinstance(module, nn.Conv2d | nn.Conv3d):
                    undo.callback(module.register_forward_hook(lambda *_: on_progress()).remove)
                if not alone and hasattr(module, ATTENTION):
                    replace(module, ATTENTION, functools.partial(attend, getattr(module, ATTENTION)))
            code = sys.modules[type(self.module).__module__]
            if not alone and hasattr(code, CHUNK):
                size = _smallest(getattr(code, CHUNK)(slab.values.device), slab.axis)
                replace(code, CHUNK, lambda _: slab.axis.size * size)
            return getattr(self.module, method)(values, **options)


def _rows(decoded: Tensor, axis: Communicator) -> Slab:
    """Return this rank's rows of the result of ComfyUI's code."""
    return Slab(decoded.local, decoded.runs, decoded.axis) if isinstance(decoded, RowTensor) else slab_of(decoded, axis)


def _smallest(number: int, axis: Communicator) -> int:
    """Return the smallest of all ranks' numbers. This is a collective."""
    numbers = axis.all_gather(torch.tensor([[[number]]], device=axis.device), [1] * axis.size)
    return int(numbers.min())
