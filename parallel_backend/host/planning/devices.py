"""The devices behind a plan's `devices`: those of this machine, or of a group on other machines."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import msgspec
import psutil
import torch

from ...gpus import Gpu, visible_gpus
from ...plan import ParallelPlan
from ...plan.devices import AUTOMATIC_AMONG
from ...wire.address import Address
from ..workers.remote import address_of, ask, device_names, is_remote

log = logging.getLogger(__name__)


class Devices:
    """A register of the devices behind "auto" on this machine, and of the ranks at an address. Both are looked up once."""

    def __init__(self) -> None:
        self._remote: dict[Address, tuple[str, ...]] = {}

    def placed_on_devices(self, plan: ParallelPlan) -> ParallelPlan:
        """Return a plan that names the devices behind its `devices`.

        An address becomes the devices of the group on other machines. Automatic devices become those worth using together.

        Raises:
            Refused: the address is invalid, or no group of ours answers there.
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
        """Return the devices behind "auto" on this machine."""
        try:
            gpus = visible_gpus() if torch.cuda.device_count() > 1 else ()
        except RuntimeError:  # such as a driver that is too old, which the workers report
            gpus = ()
        used = select_gpus(gpus) if gpus else ()
        if len(used) == len(gpus):
            return "auto"
        log.info("Parallel: %s", selection_note(gpus, used))
        return AUTOMATIC_AMONG + ",".join(map(str, used))

    def learn(self, devices: tuple[str, ...]) -> None:
        """Remember the devices of a group on other machines, which has been joined."""
        self._remote[address_of(devices[0])] = devices

    def forget(self, devices: tuple[str, ...]) -> None:
        """Forget the devices at their address, so that they are asked for again."""
        self._remote.pop(address_of(devices[0]), None)


class DeviceMemory(msgspec.Struct, frozen=True):
    """A device with its memory, and a GPU's load and temperature.

    Attributes:
        device: the device as plans name it. "cpu" is the computer's own memory.
        name: the model of a GPU.
        total, free: bytes of memory. `free` is None if not known.
        load: in percent, or None if not known.
        temperature: in degrees Celsius, or None if not known.
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


TENSOR_CORES_FOR_BF16 = (8, 0)
"""Least compute capability for bf16 in tensor cores. Older GPUs compute in fp16 or fp32, without flash attention."""

OLDER = 0.5
DISPLAY = 0.9
"""Factors of the speed of an older GPU, and of a GPU that draws a desktop."""

LEAST_PACE = 1 / 3
"""Least speed of a GPU that `auto` uses, relative to the fastest GPU. A slower GPU costs more than it saves."""

LEAST_MEMORY = 0.5
"""Least memory of a GPU that `auto` uses, relative to the largest. Each rank of Ulysses and Ring holds all weights."""


def select_gpus(gpus: Sequence[Gpu]) -> tuple[int, ...]:
    """Return the indices of the GPUs that `auto` uses.

    GPUs with little memory are left out. Of the others, those that are much slower than the fastest are left out.
    """
    largest = max(gpu.memory for gpu in gpus)
    large = [index for index, gpu in enumerate(gpus) if gpu.memory >= LEAST_MEMORY * largest]
    fastest = max(pace(gpus[index]) for index in large)
    return tuple(index for index in large if pace(gpus[index]) >= LEAST_PACE * fastest)


def pace(gpu: Gpu) -> float:
    """Return a measure of a GPU's speed that is good enough to tell kinds apart.

    It is the number of multiprocessors, reduced if the GPU is old or has a display.
    """
    older = OLDER if gpu.capability < TENSOR_CORES_FOR_BF16 else 1.0
    return gpu.multiprocessors * older * (DISPLAY if gpu.display else 1.0)


def selection_note(gpus: Sequence[Gpu], used: Sequence[int]) -> str:
    """Return a sentence on why some GPUs are left out."""
    excluded = ", ".join(_described(index, gpu) for index, gpu in enumerate(gpus) if index not in used)
    everyone = ",".join(str(index) for index in range(len(gpus)))
    return (
        f"devices auto leaves out {excluded}: a GPU that is less than a third as fast as the fastest, or has less than half of "
        f"the largest one's memory, would hold up {_listed(used)}; write {everyone} into devices of Parallel Plan to use all."
    )


def _described(index: int, gpu: Gpu) -> str:
    display = ", with a display" if gpu.display else ""
    return f"GPU {index} ({gpu.name}, {gpu.multiprocessors} multiprocessors, {gpu.memory / 1e9:.1f} GB{display})"


def _listed(used: Sequence[int]) -> str:
    return f"GPU{'s' if len(used) > 1 else ''} {', '.join(map(str, used))}"
