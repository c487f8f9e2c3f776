"""The devices that stand behind a plan's `devices`: those of this machine, or of a group on other ones."""

from __future__ import annotations

import functools
import logging

import msgspec
import psutil
import torch

from ...gpus import visible_gpus
from ...plan import ParallelPlan
from ...plan.devices import AUTOMATIC_AMONG, select_gpus, why
from ...wire.address import Address
from ..workers.remote import address_of, ask, device_names, is_remote

log = logging.getLogger(__name__)


class Devices:
    """Knows what "auto" comes to here, and who the ranks at an address are; both are found once."""

    def __init__(self) -> None:
        self._remote: dict[Address, tuple[str, ...]] = {}

    def placed_on_devices(self, plan: ParallelPlan) -> ParallelPlan:
        """A plan with the devices named that stand behind its `devices`: those of a group on other machines, by its address,
        and of automatic ones those that are worth using together.

        Raises:
            Refused: the address is none, or no group of ours answers there.
        """
        if plan.devices.strip().lower() == "auto":
            return msgspec.structs.replace(plan, devices=self._automatic)
        if not is_remote(plan.devices):
            return plan
        address = Address.parse(plan.devices)
        if address not in self._remote:
            self._remote[address] = device_names(address, ask(address))
        return msgspec.structs.replace(plan, devices=",".join(self._remote[address]))

    @functools.cached_property
    def _automatic(self) -> str:
        """What "auto" comes to on this machine."""
        try:
            gpus = visible_gpus() if torch.cuda.device_count() > 1 else ()
        except RuntimeError:  # such as a driver that is too old, which the workers name
            gpus = ()
        used = select_gpus(gpus) if gpus else ()
        if len(used) == len(gpus):
            return "auto"
        log.info("Parallel: %s", why(gpus, used))
        return AUTOMATIC_AMONG + ",".join(map(str, used))

    def learn(self, devices: tuple[str, ...]) -> None:
        """Keep the devices of a group on other machines, which has been joined."""
        self._remote[address_of(devices[0])] = devices

    def forget(self, devices: tuple[str, ...]) -> None:
        """Ask at their address anew."""
        self._remote.pop(address_of(devices[0]), None)


class DeviceMemory(msgspec.Struct, frozen=True):
    """A device as plans name it ("cpu" is the computer's own memory), what it is, its bytes, and a GPU's load and heat.

    `load` is in percent, `temperature` in degrees Celsius; these and `free` are None if not known.
    """

    device: str
    name: str
    total: int
    free: int | None
    load: int | None = None
    temperature: int | None = None


def device_memory() -> list[DeviceMemory]:
    """Return the memory of all GPUs that torch sees and of the computer.

    This opens no GPU; asking the driver may take a second or two.
    """
    try:
        gpus = visible_gpus() if torch.version.cuda is not None else ()
    except (RuntimeError, AssertionError):  # no driver, or one that is too old
        gpus = ()
    host = psutil.virtual_memory()
    gpu_memory = [
        DeviceMemory(f"cuda:{index}", gpu.name, gpu.memory, gpu.free, gpu.load, gpu.temperature)
        for index, gpu in enumerate(gpus)
    ]
    return [*gpu_memory, DeviceMemory("cpu", "", host.total, host.available)]
