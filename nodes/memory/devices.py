"""Unload ComfyUI's own models from the devices that workers are about to use."""

from __future__ import annotations

from collections.abc import Sequence

import comfy.model_management
import torch

from ...parallel_backend.diffusion import ModelSpec
from ...parallel_backend.host import Backend
from ...parallel_backend.plan.predict.profiles import CONTEXT_BYTES
from .loaded_models import DeviceShare


def reclaimable_bytes(device: str) -> int:
    """Return the bytes that ComfyUI's own models hold on a GPU. ComfyUI unloads them for the workers."""
    if not device.startswith("cuda"):
        return 0
    loaded = [entry.model for entry in comfy.model_management.current_loaded_models if str(entry.device) == device]
    return sum(model.loaded_size() for model in loaded if model is not None and not hasattr(model, "remote"))


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
