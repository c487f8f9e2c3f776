"""What the workers hold, as ComfyUI's memory management sees it: a model of its own on each of ComfyUI's devices.

ComfyUI asks for room by device, and of the models there. So when it takes one of them off, that device's workers alone give way;
and all do when it unloads everything, device by device.
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
    """Weights in the workers."""

    @property
    def backend(self) -> Backend:
        """Whose workers they are."""

    @property
    def spec(self) -> ModelSpec:
        """The model that they hold."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Which of them take part, a device each."""

    def bytes_on(self, device: torch.device) -> int:
        """About how many bytes all workers on a device of this process hold, once they are loaded."""


class WorkerPatcher(comfy.model_patcher.ModelPatcher):  # type: ignore[misc]
    """A ModelPatcher of weights that workers hold on its load device: there is nothing to move, only to release."""

    @property
    def remote(self) -> Remote:
        """Where the weights are."""
        return self.model.remote  # type: ignore[no-any-return]

    def model_size(self) -> int:
        """Bytes that the workers hold, or will hold, on this process's device."""
        return self.remote.bytes_on(self.load_device)

    def loaded_size(self) -> int:
        """Bytes that the workers hold now on this process's device."""
        return self.remote.backend.resident_bytes(self.remote.spec, device_name(self.load_device))

    def partially_unload(self, *_: Any, **__: Any) -> int:
        """Make the workers on this device give their weights' memory back, all of it; others keep theirs."""
        freed = self.loaded_size()
        self.remote.backend.release(self.remote.spec, lambda name: name == device_name(self.load_device))
        return freed

    def current_loaded_device(self) -> torch.device:
        """Weights are never anywhere else."""
        return self.load_device  # type: ignore[no-any-return]


class DeviceShare(WorkerPatcher):
    """A model's weights on a device beside the one that its MODEL or VAE is on."""

    def __init__(self, remote: Remote, device: torch.device) -> None:
        stand_in: Any = nn.Module()
        stand_in.remote = remote
        super().__init__(stand_in, load_device=device, offload_device=torch.device("cpu"))

    def partially_load(self, *_: Any, **__: Any) -> int:
        """The workers load the weights when they are asked to compute."""
        return 0

    def detach(self, unpatch_all: bool = True) -> nn.Module:
        """Where ComfyUI unloads this (`unpatch_all`), the workers on its device give their memory back."""
        if unpatch_all:
            self.partially_unload()
        return self.model  # type: ignore[no-any-return]


class MainShare(WorkerPatcher):
    """A model's weights on the device that its VAE is on, in a module with its Shares; the others come and go with it."""

    def partially_load(self, *_: Any, **__: Any) -> int:
        """The workers load the weights when they are asked to compute."""
        self.model.shares.enlist()
        return 0

    def detach(self, unpatch_all: bool = True) -> nn.Module:
        """Where ComfyUI unloads this (`unpatch_all`), workers give their memory back; see Shares."""
        if unpatch_all:
            self.model.shares.release_main()
        return self.model  # type: ignore[no-any-return]


class Shares:
    """A model's weights on ComfyUI's devices: each but the MODEL's or VAE's own has a Share.

    Args:
        main: the MODEL's or VAE's device.
        devices: all of ComfyUI's.
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
        """The same ones: a copy of a VAE has its weights where the VAE has them."""
        return self

    def of(self, remote: Remote) -> Shares:
        """Those of other weights in these ones' place."""
        return Shares(remote, self._main, self._devices)

    def enlist(self) -> None:
        """Have ComfyUI count those among its models that it does not, because it has taken them off their device."""
        listed = comfy.model_management.current_loaded_models
        for share in self._shares.values():
            if not any(entry.model is share for entry in listed):
                entry = comfy.model_management.LoadedModel(share)
                entry.model_load()
                listed.insert(0, entry)

    def release_main(self) -> None:
        """Make the workers on the MODEL's or VAE's own device give their memory back, and those whose device ComfyUI does not
        know: other machines', and the CPU beside GPUs."""
        self._remote.backend.release(self._remote.spec, lambda name: name not in self._shares)


def device_name(device: torch.device) -> str:
    """A device of this process as plans name it."""
    return "cpu" if device.type == "cpu" and device.index is None else f"{device.type}:{device.index or 0}"
