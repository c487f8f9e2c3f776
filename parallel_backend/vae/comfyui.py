"""Any of ComfyUI's autoencoders that is declared, its own code over the rows of all ranks."""

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
"""Where ComfyUI's attention blocks keep the function that they call."""

CHUNK = "get_max_chunk_size"
"""What LTX-Video's code asks for the bytes it decodes at a time: by the memory of a rank's own device, so ranks agree on
the least, and have N times as much between them."""


class ComfyAutoencoderFamily:
    """Reads whatever files ComfyUI's Load VAE reads, of the declared classes."""

    imports: tuple[str, ...] = ()

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """By a decoder; which one is ComfyUI's to say."""
        return any(name.startswith("decoder.") for name in checkpoint.entries)

    def configure(self, checkpoint: Checkpoint) -> Detected:
        """What ComfyUI finds in the file."""
        detected = detect(checkpoint)
        missing = without_encoder(detected.module, lambda name: detected.names.get(name, name), checkpoint)
        return dataclasses.replace(detected, missing=missing)

    def kind(self, config: Detected) -> str:
        """What ComfyUI calls the decoder that was found."""
        return config.kind

    def dims(self, config: Detected) -> int:
        """A video's or a picture's."""
        return int(config.vae.latent_dim) + 2

    def channels(self, config: Detected) -> int:
        """Channels of a latent."""
        return int(config.vae.latent_channels)

    def missing(self, config: Detected) -> str:
        """What ComfyUI warns of, and encodes without."""
        return config.missing

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
        channels = getattr(vae, "conv_out_channels", vae.output_channels)  # Wan 2.1's are by the file
        return (batch, channels, *count, height * scale, width * scale)

    def build(self, config: Detected) -> ComfyAutoencoder:
        """The autoencoder on the meta device."""
        return ComfyAutoencoder(config.module, int(config.vae.spacial_compression_decode()))


class ComfyAutoencoder:
    """ComfyUI's module, run as it is: on one rank on tensors, on several on `RowTensor`s."""

    def __init__(self, module: nn.Module, scale: int) -> None:
        self.module = module
        self.scale = scale

    def decode(self, latent: Slab, schedule: str, on_progress: OnProgress, give: Give) -> None:
        """Each rank keeps its rows of the few frames that are on their way.

        Noise that ComfyUI mixes into a latent is in it already.
        """
        batches = frames.Batches(give)
        if self._in_turns(latent):
            batches.add(in_tiles(self.module, "decode", latent, on_progress))
        else:
            frames.decode(
                self.module,
                lambda **options: self._run("decode", latent, on_progress, **options),
                lambda decoded: batches.add(_rows(decoded, latent.axis)),
                latent.values.dim(),
            )
        batches.flush()

    def encode(self, pixels: Slab, schedule: str, on_progress: OnProgress) -> Iterator[Slab]:
        """The means, in one piece."""
        if self._in_turns(pixels):
            yield in_tiles(self.module, "encode", pixels, on_progress)
        else:
            yield _rows(self._run("encode", pixels, on_progress), pixels.axis)

    def _in_turns(self, slab: Slab) -> bool:
        """Whether ranks take turns at whole tiles."""
        return slab.axis.size > 1 and has_tiles(self.module)

    def _run(self, method: str, slab: Slab, on_progress: OnProgress, **options: Any) -> Any:
        """What ComfyUI's method returns of the rows of all ranks, or of a tensor on one."""
        alone = slab.axis.size == 1
        values = slab.values if alone else RowTensor.of(slab, RULES)
        with ExitStack() as undo:

            def replace(owner: Any, name: str, value: Any) -> None:
                undo.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)

            if noise_scale(self.module):
                replace(self.module, "timestep_conditioning", False)  # its layers' own stays
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
    """This rank's rows of what ComfyUI's code made."""
    return Slab(decoded.local, decoded.runs, decoded.axis) if isinstance(decoded, RowTensor) else slab_of(decoded, axis)


def _smallest(number: int, axis: Communicator) -> int:
    """Of all ranks' numbers. A collective."""
    numbers = axis.all_gather(torch.tensor([[[number]]], device=axis.device), [1] * axis.size)
    return int(numbers.min())
