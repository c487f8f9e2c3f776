"""Start and end of a run of a ComfyUI model in a worker, with the calls that ComfyUI's ModelPatcher makes."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from torch import nn

PATCHER = "current_patcher"
"""The attribute of ComfyUI's BaseModel that its ModelPatcher sets before a run, and clears after it."""


def has_setter(base: Any) -> bool:
    """Return True if the class of a BaseModel has a property setter for `current_patcher`."""
    return isinstance(inspect.getattr_static(type(base), PATCHER, None), property)


class ModelRun:
    """A run of a model, which ends when this object is garbage collected.

    The start sets the BaseModel's `current_patcher`, and the end clears it. A class may have a setter for this attribute that
    writes into the diffusion model. For a class without a setter nothing happens.

    Args:
        base: ComfyUI's BaseModel on the meta device.
        module: the diffusion model that computes: the BaseModel's own, or a copy with hooks in place of blocks.
        device: the rank's device; model code asks the patcher for the free memory of this device.
    """

    def __init__(self, base: Any, module: nn.Module, device: torch.device) -> None:
        if not has_setter(base):
            return
        end_run(base)
        from comfy.model_patcher import ModelPatcher

        base.diffusion_model = module
        patcher = ModelPatcher(base, device, torch.device("cpu"))
        patcher.pre_run()
        weakref.finalize(self, _end, base, patcher).atexit = False


def end_run(base: Any) -> None:
    """Clear the `current_patcher` of a BaseModel with a setter, so that the model frees the caches of the run."""
    if has_setter(base) and base.current_patcher is not None:
        base.current_patcher = None


def _end(base: Any, patcher: Any) -> None:
    """End the run of this patcher; do nothing if a later run has begun."""
    if base.current_patcher is patcher:
        end_run(base)
