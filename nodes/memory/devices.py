"""Making ComfyUI's own models leave the devices that workers are about to use."""

from __future__ import annotations

from collections.abc import Sequence

import comfy.model_management
import torch

from ...parallel_backend.diffusion import ModelSpec
from ...parallel_backend.host import Backend
from ...parallel_backend.plan.predict.profiles import CONTEXT_BYTES
from .loaded_models import DeviceShare


def reclaimable_bytes(device: str) -> int:
    """Bytes that ComfyUI's own models hold on a GPU: they make way for workers."""
    if not device.startswith("cuda"):
        return 0
    loaded = [entry.model for entry in comfy.model_management.current_loaded_models if str(entry.device) == device]
    return sum(model.loaded_size() for model in loaded if model is not None and not hasattr(model, "remote"))


def free_devices(backend: Backend, model: ModelSpec, workers: Sequence[str], worker_bytes: float) -> None:
    """Ask ComfyUI for room on every device of this machine that workers use; models there leave as far as it takes.

    ComfyUI does so by itself for the device that it computes on, and only for that one. Where none of its models is, it is
    not asked (workers make room among themselves): looking at what is free would open the GPU in its process, which takes
    0.3 to 0.5 GB of it.

    Args:
        model: the one that stays.
        workers: each worker's device.
        worker_bytes: bytes that a worker needs, weights that it may hold already included.
    """
    loaded = [(entry, entry.model) for entry in comfy.model_management.current_loaded_models]
    # held in `loaded`, no model is garbage collected while ComfyUI goes through them
    ours = [entry for entry, patcher in loaded if getattr(getattr(patcher, "remote", None), "spec", None) == model]
    for name in dict.fromkeys(workers):
        if "/" in name:
            continue  # of another machine
        device, count = torch.device(name), workers.count(name)
        resident_bytes = backend.resident_bytes(model, name)
        contexts = count * CONTEXT_BYTES if device.type == "cuda" and not resident_bytes else 0
        needed = count * worker_bytes - resident_bytes + contexts
        if device.type == "cuda" and _keeps(device) and torch.cuda.mem_get_info(device)[0] < needed:
            comfy.model_management.soft_empty_cache()  # what torch keeps looks free to ComfyUI, but only to it
        if any(
            entry.device == device and not isinstance(patcher, DeviceShare)
            for entry, patcher in loaded
            if entry not in ours
        ):
            comfy.model_management.free_memory(needed, device, keep_loaded=ours)


def _keeps(device: torch.device) -> bool:
    """Whether torch keeps memory of a GPU for later in this process, which then has it open already."""
    return torch.cuda.memory_reserved(device) > torch.cuda.memory_allocated(device)
