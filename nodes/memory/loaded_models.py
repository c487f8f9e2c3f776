"""Models that represent the workers' weights in ComfyUI's memory management, one on each of ComfyUI's devices.

ComfyUI frees memory device by device, by unloading models on that device. If it unloads the model of one device, only the
workers on that device release their weights. If it unloads everything, all workers do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import comfy.model_management
import comfy.model_patcher
import torch
from torch import nn

from ...parallel_backend.diffusion import ModelSpec
from ...parallel_backend.host import Backend


class Remote(Protocol):
    """Weights that workers hold."""

    @property
    def backend(self) -> Backend:
        """Return the Backend of the workers."""

    @property
    def spec(self) -> ModelSpec:
        """Return the model that the workers hold."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Return the devices of the workers that take part, one per worker."""

    def bytes_on(self, device: torch.device) -> int:
        """Return about how many bytes all workers on a device of this process hold when the weights are loaded."""


class WorkerPatcher(comfy.model_patcher.ModelPatcher):  # type: ignore[misc]
    """A ModelPatcher for weights that workers hold on its load device. ComfyUI can release the weights, but not move them."""

    @property
    def remote(self) -> Remote:
        """Return the weights in the workers."""
        return self.model.remote  # type: ignore[no-any-return]

    def model_size(self) -> int:
        """Return the bytes that the workers hold, or will hold, on the load device."""
        return self.remote.bytes_on(self.load_device)

    def loaded_size(self) -> int:
        """Return the bytes that the workers hold now on the load device."""
        return self.remote.backend.resident_bytes(self.remote.spec, device_name(self.load_device))

    def partially_unload(self, *_: Any, **__: Any) -> int:
        """Make the workers on the load device release all their weights. Workers on other devices keep theirs."""
        freed = self.loaded_size()
        self.remote.backend.release(self.remote.spec, lambda name: name == device_name(self.load_device))
        return freed

    def current_loaded_device(self) -> torch.device:
        """Return the load device: the weights are never on another device."""
        return self.load_device  # type: ignore[no-any-return]


class DeviceShare(WorkerPatcher):
    """A model's weights on a device other than that of its MODEL or VAE."""

    def __init__(self, remote: Remote, device: torch.device) -> None:
        placeholder: Any = nn.Module()
        placeholder.remote = remote
        super().__init__(placeholder, load_device=device, offload_device=torch.device("cpu"))

    def partially_load(self, *_: Any, **__: Any) -> int:
        """Load nothing: the workers load the weights at their first request."""
        return 0

    def detach(self, unpatch_all: bool = True) -> nn.Module:
        """Make the workers on the load device release their memory if ComfyUI unloads this model (`unpatch_all`)."""
        if unpatch_all:
            self.partially_unload()
        return self.model  # type: ignore[no-any-return]


class MainShare(WorkerPatcher):
    """A model's weights on the device of its VAE, in a module with the Shares.

    Loading it adds the other devices' shares to ComfyUI's list. ComfyUI releases each share separately.
    """

    def partially_load(self, *_: Any, **__: Any) -> int:
        """Add the other devices' shares to ComfyUI's list. The workers load the weights at their first request."""
        self.model.shares.enlist()
        return 0

    def detach(self, unpatch_all: bool = True) -> nn.Module:
        """Make workers release their memory if ComfyUI unloads this model (`unpatch_all`); see `Shares.release_main`."""
        if unpatch_all:
            self.model.shares.release_main()
        return self.model  # type: ignore[no-any-return]


class Shares:
    """A model's weights on ComfyUI's devices, one DeviceShare for each device except that of the MODEL or VAE.

    Args:
        remote: the weights in the workers.
        main: the device of the MODEL or VAE.
        devices: all of ComfyUI's devices.
    """

    def __init__(self, remote: Remote, main: torch.device, devices: Iterable[torch.device]) -> None:
        self._remote, self._main, self._devices = remote, main, tuple(devices)
        other_devices = {device_name(device): device for device in self._devices if device != main}
        self._shares = {
            name: DeviceShare(remote, other_devices[name])
            for name in dict.fromkeys(remote.devices)
            if name in other_devices
        }

    def __deepcopy__(self, _: dict[int, Any]) -> Shares:
        """Return this same object: the copy of a VAE has its weights where the VAE has them."""
        return self

    def of(self, remote: Remote) -> Shares:
        """Return the shares of other weights on the same devices."""
        return Shares(remote, self._main, self._devices)

    def enlist(self) -> None:
        """Add the shares that ComfyUI has unloaded to its list of loaded models again."""
        listed = comfy.model_management.current_loaded_models
        for share in self._shares.values():
            if not any(entry.model is share for entry in listed):
                entry = comfy.model_management.LoadedModel(share)
                entry.model_load()
                listed.insert(0, entry)

    def release_main(self) -> None:
        """Make the workers without a share release their memory.

        These are the workers on the MODEL's or VAE's own device, on other machines, and on the CPU if ComfyUI uses GPUs.
        """
        self._remote.backend.release(self._remote.spec, lambda name: name not in self._shares)


def device_name(device: torch.device) -> str:
    """Return the name of a device of this process, as plans write it."""
    return "cpu" if device.type == "cpu" and device.index is None else f"{device.type}:{device.index or 0}"
