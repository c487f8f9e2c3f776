"""The memory of devices that workers use: what they may have of it, and ComfyUI's own models that leave it to them."""

from __future__ import annotations

from collections.abc import Sequence

import comfy.model_management
import msgspec
import torch

from ...parallel_backend.diffusion import ModelSpec
from ...parallel_backend.host import Backend
from ...parallel_backend.host.planning.devices import DeviceMemory, device_memory
from ...parallel_backend.host.workers.remote import is_remote
from ...parallel_backend.host.workers.status import GroupStatus
from ...parallel_backend.plan import ParallelPlan
from ...parallel_backend.plan.predict.profiles import CONTEXT_BYTES
from ...parallel_backend.plan.resolve import planned_devices
from .loaded_models import DeviceShare


def reclaimable_bytes(device: str) -> int:
    """Return the bytes that ComfyUI's own models hold on a GPU. ComfyUI unloads them for the workers."""
    if not device.startswith("cuda"):
        return 0
    loaded = [entry.model for entry in comfy.model_management.current_loaded_models if str(entry.device) == device]
    return sum(model.loaded_size() for model in loaded if model is not None and not hasattr(model, "remote"))


def available_memory(groups: Sequence[GroupStatus]) -> list[DeviceMemory]:
    """Return the memory of this machine's devices.

    Memory that ComfyUI and the workers of these groups would free for a run counts as free.
    """
    return [_with_ours(memory, groups) for memory in device_memory()]


def _with_ours(memory: DeviceMemory, groups: Sequence[GroupStatus]) -> DeviceMemory:
    if memory.free is None:
        return memory
    ranks = [rank for group in groups for rank in group.ranks if rank.device == memory.device]
    resident_bytes = sum(model.nbytes for rank in ranks for model in rank.held)
    free = min(memory.total, memory.free + resident_bytes + reclaimable_bytes(memory.device))
    return msgspec.structs.replace(memory, free=free)


def devices_and_memory(backend: Backend, devices: str) -> tuple[tuple[str, ...], list[DeviceMemory]]:
    """Return the workers' devices on this machine, and the memory that they may have of this machine's devices.

    Args:
        backend: the Backend of the workers.
        devices: the devices as a plan names them. Devices of other machines have no entry in the result.

    Raises:
        Refused: a device does not exist.
    """
    if is_remote(devices):
        return (), []
    plan = backend.placed_on_devices(ParallelPlan(devices=devices))
    return planned_devices(plan, torch.cuda.device_count()), available_memory(backend.status().groups)


def free_devices(backend: Backend, model: ModelSpec, workers: Sequence[str], worker_bytes: float) -> None:
    """Ask ComfyUI to free memory on every device of this machine that workers use.

    ComfyUI unloads only as many models as needed.

    ComfyUI by itself frees memory only on the device that it computes on. A device without ComfyUI's models is skipped, as
    workers free memory among themselves. Reading the free memory of such a GPU would open the GPU in ComfyUI's process, which
    takes 0.3 to 0.5 GB of GPU memory.

    Args:
        backend: the Backend of the workers.
        model: the model that ComfyUI must not unload.
        workers: each worker's device.
        worker_bytes: bytes that a worker needs, including weights that the worker may already hold.
    """
    loaded = [(entry, entry.model) for entry in comfy.model_management.current_loaded_models]
    # the references in `loaded` keep ComfyUI's models alive while ComfyUI goes through them
    ours = [entry for entry, patcher in loaded if getattr(getattr(patcher, "remote", None), "spec", None) == model]
    for name in dict.fromkeys(workers):
        if "/" in name:
            continue  # a device of another machine
        device, count = torch.device(name), workers.count(name)
        resident_bytes = backend.resident_bytes(model, name)
        contexts = count * CONTEXT_BYTES if device.type == "cuda" and not resident_bytes else 0
        needed = count * worker_bytes - resident_bytes + contexts
        if device.type == "cuda" and _keeps(device) and torch.cuda.mem_get_info(device)[0] < needed:
            comfy.model_management.soft_empty_cache()  # torch's cached memory looks free only to ComfyUI
        if any(
            entry.device == device and not isinstance(patcher, DeviceShare)
            for entry, patcher in loaded
            if entry not in ours
        ):
            comfy.model_management.free_memory(needed, device, keep_loaded=ours)


def _keeps(device: torch.device) -> bool:
    """Return True if torch caches freed memory of a GPU in this process. Then this process has opened the GPU already."""
    return torch.cuda.memory_reserved(device) > torch.cuda.memory_allocated(device)
