"""ParallelVAE: ComfyUI's VAE, its weights in the workers.

ComfyUI's own class says how pixels and latents are cropped, scaled and tiled; only its model is replaced.
"""

from __future__ import annotations

import copy
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
from ...parallel_backend.weights.values import values_of
from ..memory.loaded_models import MainShare, Shares
from ..model.dtypes import dtype_name
from ..model.refusals import VAE
from ..model.unchanged import SkeletonSnapshot
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
    devices = planned_devices(backend.placed_on_devices(plan), torch.cuda.device_count())
    vae = ParallelVAE(part)
    spec = ModelSpec(name, str(path), *part.fingerprint(), dtype_name(vae.vae_dtype), file_digest(path))
    size = sum(tensor.numel() for tensor in part.meta_tensors().values()) * vae.vae_dtype.itemsize
    vae.use(RemoteVAE(backend, AUTOENCODERS[name], config, spec, plan, devices, schedule, size), part)
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

    def use(self, remote: RemoteVAE, part: Checkpoint) -> None:
        """Have the workers do the work of the model, whose weights are in `part`."""
        self._share_memory_use(1 if self.handles_tiling else len(remote.devices))  # the first joins such tiles
        noise = noise_scale(self.first_stage_model)
        shares = Shares(remote, self.device, comfy.model_management.get_all_torch_devices())
        skeleton = with_buffers(self.first_stage_model, part)
        self.first_stage_model = VAEProxy(
            skeleton, remote, shares, self.vae_output_dtype(), self.memory_used_decode, self.memory_used_encode, noise
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
        return self._proxy().remote

    def _proxy(self) -> VAEProxy:
        """The stand-in for the autoencoder. Raises Refused if another pack has changed what only the workers have."""
        if not isinstance(self.first_stage_model, VAEProxy):
            raise VAE.refusal("Replacing first_stage_model")
        self.first_stage_model.refuse_changes()
        return self.first_stage_model

    def decode(self, samples_in: Tensor, vae_options: Mapping[str, Any] | None = None) -> Tensor:
        """As VAE Decode does. What cannot work is refused before ComfyUI makes room for it."""
        proxy, image_of_clip = self._proxy(), self.latent_dim == 2 and samples_in.ndim == 5
        shape = proxy.decode_output_shape((samples_in[:, :, 0] if image_of_clip else samples_in).shape)
        with progress().run("Decoding", steps=pictures(shape)):
            return super().decode(samples_in, vae_options or {})

    def encode(self, pixel_samples: Tensor) -> Tensor:
        """The latent of pixels, as VAE Encode asks for it; the node shows how far it is."""
        self._proxy()
        with progress().run("Encoding"):
            return super().encode(pixel_samples)

    def decode_whole(self, latent: Tensor) -> Tensor:
        """Pixels from 0 to 1, `[batch, (frames,) height, width, 3]`; never falls back to tiles, as `decode` does."""
        model = self._proxy()
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
        model, frames = self._proxy(), self.upscale_ratio[0](latent.shape[2])
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


def with_buffers(skeleton: nn.Module, part: Checkpoint) -> nn.Module:
    """An autoencoder on the meta device with the values of its buffers, statistics that nodes of ComfyUI's read."""
    for prefix, module in skeleton.named_modules():
        for name, values in module._buffers.items():
            entry = part.entries.get(f"{prefix}.{name}".lstrip("."))
            if values is not None and values.is_meta and entry is not None:
                module._buffers[name] = values_of(entry).to(values.dtype)
    return skeleton


class VAEProxy(nn.Module):
    """The weightless stand-in for ComfyUI's autoencoder: has its modules, for nodes that look at them, and none of their weights.

    A copy shares the weights in the workers, and is a user of them like the original.

    Args:
        skeleton: ComfyUI's autoencoder on the meta device; whatever is changed in it is refused.
        to_decode, to_encode: bytes that a worker needs beside the weights, by the shape and dtype of what it is given.
        noise: the share of random noise that the autoencoder mixes into a latent. It is drawn here, by the generator that
            ComfyUI's own would use.
    """

    comfy_has_chunked_io = True
    """ComfyUI's word for writing into its buffer piece by piece."""

    def __init__(
        self,
        skeleton: nn.Module,
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
        self._stand_for(skeleton)

    def _stand_for(self, skeleton: nn.Module) -> None:
        """Stand for an autoencoder that is as ComfyUI made it."""
        self._modules, self._parameters, self._buffers = skeleton._modules, skeleton._parameters, skeleton._buffers
        self._skeleton = (skeleton,)  # in a tuple, so that it does not become a submodule
        self._snapshot = SkeletonSnapshot(skeleton, VAE)
        self._own = {*vars(self), "_own"}
        self.remote.backend.retain(self, self.remote.spec)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The skeleton's, for nodes that ask which autoencoder they are given."""
        return type(self.__dict__["_skeleton"][0]) if "_skeleton" in self.__dict__ else type(self)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_skeleton"][0], name)

    def __copy__(self) -> VAEProxy:
        """Another user of the same weights, with the same modules."""
        copied = self._blank()
        copied.remote.backend.retain(copied, copied.remote.spec)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> VAEProxy:
        """Another user of the same weights, with modules of its own. Raises Refused if these modules were changed."""
        self.refuse_changes()
        copied = memo[id(self)] = self._blank()
        copied._stand_for(copy.deepcopy(self._skeleton[0], memo))
        return copied

    def _blank(self) -> VAEProxy:
        copied = VAEProxy.__new__(VAEProxy)
        copied.__dict__.update(self.__dict__)
        return copied

    def _apply(self, *_: Any, **__: Any) -> VAEProxy:  # type: ignore[override]
        """Leave weights where they are, whatever device or type a node moves the autoencoder to."""
        return self

    def refuse_changes(self) -> None:
        """Raise Refused if another pack has changed what only the workers have, or code that only they run."""
        self._snapshot.refuse_changes()
        skeleton = self._skeleton[0]
        for name in vars(self):
            if name not in self._own and hasattr(skeleton, name) and not hasattr(VAEProxy, name):
                raise VAE.refusal(f"Changing first_stage_model.{name}")

    def decode_output_shape(self, latent: Sequence[int]) -> tuple[int, ...]:
        """The shape of the pixels of a latent. Raises Refused for a latent of another VAE, or one too long for the RAM."""
        return self.remote.decoded_shape(tuple(latent), self._output_dtype.itemsize)

    def decode(self, latent: Tensor, output_buffer: Tensor | None = None, bar: Any = None) -> Tensor:
        """The pixels of a latent, into the buffer if there is one; the progress bar, given or new, counts pictures."""
        self.refuse_changes()
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
        self.refuse_changes()
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
