"""RemoteVAE: an autoencoder in the workers, with methods to decode and encode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...parallel_backend.diffusion import ModelSpec
from ...parallel_backend.errors import Cancelled, Refused
from ...parallel_backend.host import Backend
from ...parallel_backend.plan import ParallelPlan
from ...parallel_backend.vae import AutoencoderFamily
from ...parallel_backend.worker.memory.rank_memory import available_on_host
from ..memory.devices import free_devices
from ..memory.loaded_models import device_name
from ..model.remote_model import caller, interruption

GIGABYTE = 10**9


@dataclass(frozen=True)
class RemoteVAE:
    """An autoencoder in the workers. The workers start and load the weights at its first use."""

    backend: Backend
    family: AutoencoderFamily
    config: Any
    spec: ModelSpec
    requested_plan: ParallelPlan
    devices: tuple[str, ...]
    schedule: str
    weight_bytes: int

    def __deepcopy__(self, _: dict[int, Any]) -> RemoteVAE:
        """Return this same object: copies of a VAE share the weights."""
        return self

    def bytes_on(self, device: torch.device) -> int:
        """Return the bytes of weights that all workers on a device of this process hold when the weights are loaded."""
        return self.devices.count(device_name(device)) * self.weight_bytes

    @property
    def dims(self) -> int:
        """Return the number of dimensions of a latent."""
        return self.family.dims(self.config)

    @property
    def kind(self) -> str:
        """Return the VAE's name in messages."""
        return self.family.kind(self.config)

    def frames(self, latent_frames: int) -> int:
        """Return the number of frames of a video with this number of latent frames."""
        return self.family.decoded_shape(self.config, (1, 1, latent_frames, 1, 1))[2]

    def decoded_shape(self, latent: Sequence[int], element: int) -> tuple[int, ...]:
        """Return the shape of the decoded pixels of a latent, `[batch, 3, (frames,) height, width]`.

        Args:
            latent: the latent's shape.
            element: bytes of a decoded value in this process.

        Raises:
            Refused: the latent is not of this VAE, or the pixels do not fit into memory.
        """
        channels = self.family.channels(self.config)
        if len(latent) != self.dims or latent[1] != channels or min(latent) < 1:
            layout = f"[batch, {channels}, {'frames, ' if self.dims == 5 else ''}height, width]"
            raise Refused(
                f"the latent has the shape {list(latent)} and {self.kind} takes {layout}: use the VAE that belongs to the "
                "model which made the latent."
            )
        shape = self.family.decoded_shape(self.config, latent)
        needed, free = torch.Size(shape).numel() * element, available_on_host()
        if needed > free:
            *_, height, width = shape
            count = shape[0] * (shape[2] if self.dims == 5 else 1)
            most = int(count * free / needed)
            fewer = f"decode {most} of them at a time" if most else "close other programs"
            raise Refused(
                f"{count} decoded pictures of {width} x {height} take {needed / GIGABYTE:.1f} GB of RAM and "
                f"{free / GIGABYTE:.1f} GB are free: {fewer}, or use a smaller size."
            )
        return shape

    def decode(self, latent: Tensor, on_pixels: Callable[[int, int, Tensor], None], working: int) -> None:
        """Decode a batch of latents.

        Args:
            latent: the latents.
            on_pixels: is called with the item of the batch, the first frame and the pixels `[3, (frames,) height, width]`, in
                order, as they arrive.
            working: bytes that a worker needs besides the weights.
        """
        with self._asking(working):
            self.backend.decode(self.spec, self.requested_plan, self.schedule, latent, on_pixels, caller(), working)

    def encode(self, pixels: Tensor, working: int) -> Tensor:
        """Return the means of the latents of pixels, in the pixels' dtype.

        Args:
            pixels: `[batch, 3, (frames,) height, width]` from -1 to 1.
            working: bytes that a worker needs besides the weights.

        Raises:
            Refused: the file has no encoder.
        """
        if missing := self.family.missing(self.config):
            raise Refused(
                f"{Path(self.spec.path).name} lacks the tensor {missing}, so it can decode but not encode: choose a VAE "
                "file with an encoder."
            )
        with self._asking(working):
            answer = self.backend.encode(self.spec, self.requested_plan, self.schedule, pixels, caller(), working)
        latent: Tensor = answer.frame.tensors["latent"]
        return latent

    @contextmanager
    def _asking(self, working: int) -> Iterator[None]:
        """Free device memory for the work inside this context, and turn Cancel into ComfyUI's own exception."""
        free_devices(self.backend, self.spec, self.devices, self.weight_bytes + working)
        try:
            yield
        except Cancelled:
            raise interruption() from None
