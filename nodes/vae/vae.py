"""ParallelVAE: ComfyUI's VAE with its weights in the workers.

ComfyUI's class crops, scales and tiles pixels and latents. Only its model is replaced.
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
"""A function that returns the bytes needed for work on a latent or on pixels, by shape and dtype."""

BYTES_OF_A_BLENDED_VALUE = 6
"""Bytes per decoded value: the value in fp32, and a third of its pixel's fp32 blending weight, rounded up."""


def load_vae(backend: Backend, path: str, plan: ParallelPlan, schedule: str) -> ParallelVAE:
    """Return a VAE for a file, of which only the header is read.

    Args:
        backend: the Backend whose workers load the weights.
        path: the file.
        plan: the requested plan.
        schedule: the schedule of CogVideoX's frame batches, one of `SCHEDULES`.

    Raises:
        Refused: the file has no VAE of a supported kind, or the plan's devices do not exist.
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
        Refused: the file lacks tensors, or has other tensors than ComfyUI's VAE of its kind.
    """

    # attributes of ComfyUI's class that this class replaces
    first_stage_model: Any
    patcher: Any
    upscale_ratio: Any
    memory_used_decode: MemoryUse
    memory_used_encode: MemoryUse

    def __init__(self, part: Checkpoint) -> None:
        with on_meta(part) as tensors:
            super().__init__(sd=tensors, metadata=dict(part.metadata))

    def use(self, remote: RemoteVAE, part: Checkpoint) -> None:
        """Replace the model by a proxy for the autoencoder in the workers. `part` has the file's tensors."""
        self._share_memory_use(1 if self.handles_tiling else len(remote.devices))  # the first worker joins tiles
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
        if self.latent_dim == 3:  # ComfyUI's formula is right only for an odd number of latent frames
            self.upscale_ratio = (remote.frames, *self.upscale_ratio[1:])

    @property
    def remote(self) -> RemoteVAE:
        """Return the weights in the workers."""
        return self._proxy().remote

    def _proxy(self) -> VAEProxy:
        """Return the proxy for the autoencoder. Raise Refused if another pack has changed it or its code."""
        if not isinstance(self.first_stage_model, VAEProxy):
            raise VAE.refusal("Replacing first_stage_model")
        self.first_stage_model.refuse_changes()
        return self.first_stage_model

    def decode(self, samples_in: Tensor, vae_options: Mapping[str, Any] | None = None) -> Tensor:
        """Decode as VAE Decode does. Refuse an impossible decode before ComfyUI frees memory for it."""
        proxy, image_of_clip = self._proxy(), self.latent_dim == 2 and samples_in.ndim == 5
        shape = proxy.decode_output_shape((samples_in[:, :, 0] if image_of_clip else samples_in).shape)
        with progress().run("Decoding", steps=pictures(shape)):
            return super().decode(samples_in, vae_options or {})

    def encode(self, pixel_samples: Tensor) -> Tensor:
        """Return the latent of pixels, for VAE Encode, and show the progress on the node."""
        self._proxy()
        with progress().run("Encoding"):
            return super().encode(pixel_samples)

    def decode_whole(self, latent: Tensor) -> Tensor:
        """Return pixels from 0 to 1, `[batch, (frames,) height, width, 3]`. Unlike `decode`, never fall back to tiles."""
        model = self._proxy()
        pixels = torch.empty(model.decode_output_shape(latent.shape), dtype=self.vae_output_dtype())
        needed = self.memory_used_decode(latent.shape, self.vae_dtype)
        with progress().run("Decoding", steps=pictures(pixels.shape)):
            comfy.model_management.load_models_gpu([self.patcher], memory_required=needed)
            model.decode(latent.to(self.vae_dtype), output_buffer=pixels)
        return self.process_output(pixels).to(self.output_device).movedim(1, -1)  # type: ignore[no-any-return]

    def decode_in_tiles(self, latent: Tensor, side: int) -> Tensor:
        """Decode a video's latent as `decode_whole` does, but approximately and with less memory.

        Squares of `side` pixels are decoded one after another, with all frames and on all workers. They overlap by a quarter of
        their side, and ComfyUI blends the overlaps.
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
        """Refuse Save VAE, which reads the weights here."""
        raise Refused("Saving a parallel VAE cannot be done: the weights live in the workers; use Load VAE.")

    def _share_memory_use(self, ranks: int) -> None:
        """Divide ComfyUI's estimate of the memory for decoding and encoding by the number of workers."""
        decode, encode = self.memory_used_decode, self.memory_used_encode
        self.memory_used_decode = lambda shape, dtype: decode(shape, dtype) / ranks
        self.memory_used_encode = lambda shape, dtype: encode(shape, dtype) / ranks


def pictures(shape: Sequence[int]) -> int:
    """Return the number of pictures in pixels of shape `[batch, 3, (frames,) height, width]`."""
    return shape[0] * (shape[2] if len(shape) == 5 else 1)


def with_buffers(skeleton: nn.Module, part: Checkpoint) -> nn.Module:
    """Load the buffers of an autoencoder on the meta device. They are statistics that ComfyUI's nodes read."""
    for prefix, module in skeleton.named_modules():
        for name, values in module._buffers.items():
            entry = part.entries.get(f"{prefix}.{name}".lstrip("."))
            if values is not None and values.is_meta and entry is not None:
                module._buffers[name] = values_of(entry).to(values.dtype)
    return skeleton


class VAEProxy(nn.Module):
    """The weightless proxy for ComfyUI's autoencoder. It has the autoencoder's modules, for nodes that read them.

    A copy shares the weights in the workers, and counts as a user of them like the original.

    Args:
        skeleton: ComfyUI's autoencoder on the meta device. Changes to it are refused.
        remote: the weights in the workers.
        shares: the shares of the weights in ComfyUI's list of models.
        output_dtype: the dtype of decoded pixels.
        to_decode, to_encode: bytes that a worker needs besides the weights, by the input's shape and dtype.
        noise: the share of random noise that the autoencoder mixes into a latent. The noise is drawn in this process, by the
            generator that ComfyUI's own autoencoder would use.
    """

    comfy_has_chunked_io = True
    """ComfyUI's mark of an autoencoder that can write its output into a buffer piece by piece."""

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
        self._mirror(skeleton)

    def _mirror(self, skeleton: nn.Module) -> None:
        """Take the modules of an unchanged autoencoder, and record their state."""
        self._modules, self._parameters, self._buffers = skeleton._modules, skeleton._parameters, skeleton._buffers
        self._skeleton = (skeleton,)  # in a tuple, so that the skeleton does not become a submodule
        self._snapshot = SkeletonSnapshot(skeleton, VAE)
        self._own = {*vars(self), "_own"}
        self.remote.backend.retain(self, self.remote.spec)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Return the skeleton's class, for nodes that test an autoencoder's class."""
        return type(self.__dict__["_skeleton"][0]) if "_skeleton" in self.__dict__ else type(self)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_skeleton"][0], name)

    def __copy__(self) -> VAEProxy:
        """Return another user of the same weights, with the same modules."""
        copied = self._blank()
        copied.remote.backend.retain(copied, copied.remote.spec)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> VAEProxy:
        """Return another user of the same weights, with modules of its own. Raise Refused if these modules were changed."""
        self.refuse_changes()
        copied = memo[id(self)] = self._blank()
        copied._mirror(copy.deepcopy(self._skeleton[0], memo))
        return copied

    def _blank(self) -> VAEProxy:
        copied = VAEProxy.__new__(VAEProxy)
        copied.__dict__.update(self.__dict__)
        return copied

    def _apply(self, *_: Any, **__: Any) -> VAEProxy:  # type: ignore[override]
        """Leave weights in place, whatever device or dtype a node moves the autoencoder to."""
        return self

    def refuse_changes(self) -> None:
        """Raise Refused if another pack has changed the autoencoder, or code that only the workers run."""
        self._snapshot.refuse_changes()
        skeleton = self._skeleton[0]
        for name in vars(self):
            if name not in self._own and hasattr(skeleton, name) and not hasattr(VAEProxy, name):
                raise VAE.refusal(f"Changing first_stage_model.{name}")

    def decode_output_shape(self, latent: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a latent's pixels. Raise Refused for another VAE's latent, or for one too large for the RAM."""
        return self.remote.decoded_shape(tuple(latent), self._output_dtype.itemsize)

    def decode(self, latent: Tensor, output_buffer: Tensor | None = None, bar: Any = None) -> Tensor:
        """Return the pixels of a latent, in the buffer if one is given. The progress bar, given or new, counts pictures."""
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
        """Return the latent of pixels from -1 to 1."""
        self.refuse_changes()
        return self.remote.encode(pixels, int(self._to_encode(pixels.shape, pixels.dtype)))

    def decode_tiled(self, latent: Tensor, **_: int) -> Tensor:
        """Return the pixels of a latent. An autoencoder that tiles by itself ignores the given tile sizes."""
        return self.decode(latent)

    def encode_tiled(self, pixels: Tensor, **_: int) -> Tensor:
        """Return the latent of pixels. An autoencoder that tiles by itself ignores the given tile sizes."""
        return self.encode(pixels)


class ParallelVAEPatcher(MainShare):
    """The ModelPatcher of a VAE of Load Parallel VAE, for ComfyUI's memory management."""

    def deepclone_multigpu(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse Select VAE Device, which calls this method."""
        raise Refused("Select VAE Device cannot be used with a parallel VAE: choose devices in Parallel Plan.")
