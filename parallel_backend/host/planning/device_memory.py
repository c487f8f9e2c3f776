"""How much memory this machine's devices have, how much of it is free now, and how hard the GPUs work."""

from __future__ import annotations

import msgspec
import psutil
import torch

from ...gpus import visible_gpus


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
