"""ParallelVAE: ComfyUI's VAE, its weights in the workers.

ComfyUI's own class says how pixels and latents are cropped, scaled and tiled; only its model is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import comfy.model_management
import comfy.sd
import comfy.utils
import torch
from torch import Tensor, nn

from ...parallel_backend.diffusion import ModelSpec
from ...parallel_backend.errors import Refused
from ...parallel_backend.host import Backend
from ...parallel_backend.models.comfyui.autoencoder import noise_scale, on_meta, with_noise
from ...parallel_backend.plan import ParallelPlan
from ...parallel_backend.plan.resolve import planned_devices
from ...parallel_backend.vae import AUTOENCODERS, recognise
from ...parallel_backend.weights.files.checkpoint import Checkpoint, read_header
from ...parallel_backend.weights.files.digest import file_digest
from ..memory.loaded_models import MainShare, Shares
from ..model.dtypes import dtype_name
from ..runtime import progress
from .remote_vae import RemoteVAE

MemoryUse = Callable[[Sequence[int], torch.dtype], float]
"""Bytes that work on a latent or on pixels of a shape needs."""

BYTES_OF_A_BLENDED_VALUE = 6
"""A decoded value in fp32 and its share of the fp32 weight that its pixel's three are blended with, rounded up."""


def load_vae(backend: Backend, path: str, plan: ParallelPlan, schedule: str) -> ParallelVAE:
    """A VAE for a file; reads the file's header only.

    Raises:
        Refused: the file holds no VAE of a supported kind, or the plan's devices are not there.
    """
    name, part, config = recognise(read_header(path))
    devices = planned_devices(backend.located(plan), torch.cuda.device_count())
    vae = ParallelVAE(part)
    spec = ModelSpec(name, str(path), *part.fingerprint(), dtype_name(vae.vae_dtype), file_digest(path))
    size = sum(tensor.numel() for tensor in part.meta_tensors().values()) * vae.vae_dtype.itemsize
    vae.use(RemoteVAE(backend, AUTOENCODERS[name], config, spec, plan, devices, schedule, size))
    backend.attend(vae.first_stage_model, spec)
    return vae


class ParallelVAE(comfy.sd.VAE):  # type: ignore[misc]
    """A VAE of Load Parallel VAE.

    Raises:
        Refused: the file lacks tensors, or has others than ComfyUI's VAE of its kind.
    """

    # ComfyUI's, which are replaced here
    first_stage_model: Any
    patcher: Any
    upscale_ratio: Any
    memory_used_decode: MemoryUse
    memory_used_encode: MemoryUse

    def __init__(self, part: Checkpoint) -> None:
        with on_meta(part) as tensors:
            super().__init__(sd=tensors, metadata=dict(part.metadata))

    def use(self, remote: RemoteVAE) -> None:
        """Have the workers do the work of the model."""
        self._share_memory_use(1 if self.handles_tiling else len(remote.devices))  # the first joins such tiles
        noise = noise_scale(self.first_stage_model)
        shares = Shares(remote, self.device, comfy.model_management.get_all_torch_devices())
        self.first_stage_model = VAEProxy(
            remote, shares, self.vae_output_dtype(), self.memory_used_decode, self.memory_used_encode, noise
        )
        self.patcher = ParallelVAEPatcher(
            self.first_stage_model, load_device=self.device, offload_device=self.patcher.offload_device
        )
        self.size = remote.weight_bytes
        if self.latent_dim == 3:  # ComfyUI's formula counts the frames of an odd number of latent frames only
            self.upscale_ratio = (remote.frames, *self.upscale_ratio[1:])

    @property
    def remote(self) -> RemoteVAE:
        """Where the weights are."""
        return self.first_stage_model.remote  # type: ignore[no-any-return]

    def decode(self, samples_in: Tensor, vae_options: Mapping[str, Any] | None = None) -> Tensor:
        """As VAE Decode does. What cannot work is refused before ComfyUI makes room for it."""
        image_of_clip = self.latent_dim == 2 and samples_in.ndim == 5
        shape = self.first_stage_model.decode_output_shape((samples_in[:, :, 0] if image_of_clip else samples_in).shape)
        with progress().run("Decoding", steps=pictures(shape)):
            return super().decode(samples_in, vae_options or {})

    def encode(self, pixel_samples: Tensor) -> Tensor:
        """The latent of pixels, as VAE Encode asks for it; the node shows how far it is."""
        with progress().run("Encoding"):
            return super().encode(pixel_samples)

    def decode_whole(self, latent: Tensor) -> Tensor:
        """Pixels from 0 to 1, `[batch, (frames,) height, width, 3]`; never falls back to tiles, as `decode` does."""
        model = self.first_stage_model
        pixels = torch.empty(model.decode_output_shape(latent.shape), dtype=self.vae_output_dtype())
        needed = self.memory_used_decode(latent.shape, self.vae_dtype)
        with progress().run("Decoding", steps=pictures(pixels.shape)):
            comfy.model_management.load_models_gpu([self.patcher], memory_required=needed)
            model.decode(latent.to(self.vae_dtype), output_buffer=pixels)
        return self.process_output(pixels).to(self.output_device).movedim(1, -1)  # type: ignore[no-any-return]

    def decode_in_tiles(self, latent: Tensor, side: int) -> Tensor:
        """A video's pixels as `decode_whole` gives them, but approximate and with less memory.

        Squares of `side` pixels are decoded one after another, each with all its frames and on all workers; where they
        overlap, by a quarter of their side, ComfyUI blends them.
        """
        model, frames = self.first_stage_model, self.upscale_ratio[0](latent.shape[2])
        model.remote.decoded_shape(latent.shape, BYTES_OF_A_BLENDED_VALUE)
        tile = max(1, side // self.spacial_compression_decode())
        overlap = tile // 4
        needed = self.memory_used_decode((*latent.shape[:3], tile, tile), self.vae_dtype)
        comfy.model_management.load_models_gpu([self.patcher], memory_required=needed)
        height, width = latent.shape[3:]
        tiles = comfy.utils.get_tiled_scale_steps(width, height, tile, tile, overlap)
        count = latent.shape[0] * tiles * frames
        bar = comfy.utils.ProgressBar(count)
        with progress().run("Decoding", steps=count):
            pixels = comfy.utils.tiled_scale_multidim(
                latent,
                lambda part: model.decode(part.to(self.vae_dtype), bar=bar),
                tile=(latent.shape[2], tile, tile),
                overlap=(0, overlap, overlap),
                upscale_amount=self.upscale_ratio,
                index_formulas=self.upscale_index_formula,
                output_device=self.output_device,
            )
        return self.process_output(pixels).movedim(1, -1)  # type: ignore[no-any-return]

    def get_sd(self) -> NoReturn:
        """What Save VAE reads."""
        raise Refused("Saving a parallel VAE cannot be done: the weights live in the workers; use Load VAE.")

    def _share_memory_use(self, ranks: int) -> None:
        """What room is made for before decoding, by ComfyUI and by the workers: one worker's share of ComfyUI's estimate."""
        decode, encode = self.memory_used_decode, self.memory_used_encode
        self.memory_used_decode = lambda shape, dtype: decode(shape, dtype) / ranks
        self.memory_used_encode = lambda shape, dtype: encode(shape, dtype) / ranks


def pictures(shape: Sequence[int]) -> int:
    """How many pictures pixels `[batch, 3, (frames,) height, width]` are."""
    return shape[0] * (shape[2] if len(shape) == 5 else 1)


class VAEProxy(nn.Module):
    """The weightless stand-in for ComfyUI's autoencoder.

    Args:
        to_decode, to_encode: bytes that a worker needs beside the weights, by the shape and dtype of what it is given.
        noise: the share of random noise that the autoencoder mixes into a latent. It is drawn here, by the generator that
            ComfyUI's own would use.
    """

    comfy_has_chunked_io = True
    """ComfyUI's word for writing into its buffer piece by piece."""

    def __init__(
        self,
        remote: RemoteVAE,
        shares: Shares,
        output_dtype: torch.dtype,
        to_decode: MemoryUse,
        to_encode: MemoryUse,
        noise: float,
    ) -> None:
        super().__init__()
        self._noise = noise
        self._to_decode, self._to_encode = to_decode, to_encode
        self.remote, self.shares = remote, shares
        self._output_dtype = output_dtype

    def decode_output_shape(self, latent: Sequence[int]) -> tuple[int, ...]:
        """The shape of the pixels of a latent. Raises Refused for a latent of another VAE, or one too long for the RAM."""
        return self.remote.decoded_shape(tuple(latent), self._output_dtype.itemsize)

    def decode(self, latent: Tensor, output_buffer: Tensor | None = None, bar: Any = None) -> Tensor:
        """The pixels of a latent, into the buffer if there is one; the progress bar, given or new, counts pictures."""
        shape = self.decode_output_shape(latent.shape)
        pixels = torch.empty(shape, dtype=self._output_dtype) if output_buffer is None else output_buffer
        bar = bar or comfy.utils.ProgressBar(pictures(shape))
        if self._noise:
            latent = with_noise(latent, self._noise)

        def place(item: int, start: int, piece: Tensor) -> None:
            count = piece.shape[1] if len(shape) == 5 else 1
            into = pixels[item, :, start : start + count] if len(shape) == 5 else pixels[item]
            into.copy_(piece)
            bar.update(count)
            progress().advance(count)

        self.remote.decode(latent, place, int(self._to_decode(latent.shape, latent.dtype)))
        return pixels

    def encode(self, pixels: Tensor, device: torch.device | None = None) -> Tensor:
        """The latent of pixels from -1 to 1."""
        return self.remote.encode(pixels, int(self._to_encode(pixels.shape, pixels.dtype)))

    def decode_tiled(self, latent: Tensor, **_: int) -> Tensor:
        """An autoencoder with tiles of its own has no others."""
        return self.decode(latent)

    def encode_tiled(self, pixels: Tensor, **_: int) -> Tensor:
        """The latent of pixels; an autoencoder with tiles of its own has no others."""
        return self.encode(pixels)


class ParallelVAEPatcher(MainShare):
    """A VAE of Load Parallel VAE, as ComfyUI's memory management sees it."""

    def deepclone_multigpu(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse Select VAE Device, which asks for this."""
        raise Refused("Select VAE Device cannot be used with a parallel VAE: choose devices in Parallel Plan.")
