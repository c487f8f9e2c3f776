"""A run of ComfyUI's model in a worker, begun and ended with the calls that ComfyUI's own ModelPatcher makes."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from torch import nn

PATCHER = "current_patcher"
"""The attribute of ComfyUI's BaseModel that its ModelPatcher sets before a run, and clears after it."""


def has_setter(base: Any) -> bool:
    """Return whether the class of a BaseModel runs code of its own when its patcher is set."""
    return isinstance(inspect.getattr_static(type(base), PATCHER, None), property)


class ModelRun:
    """A run of a model; the model's class is told of its beginning here, and of its end when this object is collected.

    Nothing happens for a class without a setter: its `current_patcher` is a plain attribute, which no diffusion model sees.

    Args:
        base: ComfyUI's BaseModel on the meta device.
        module: the diffusion model whose forward runs: the BaseModel's own, or a copy of it with hooks in blocks' places.
        device: where this rank computes; a patcher is asked how much of its memory is free.
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
    """Tell a model's class, if it has a setter, that the run before has ended: it frees what it keeps for a run."""
    if has_setter(base) and base.current_patcher is not None:
        base.current_patcher = None


def _end(base: Any, patcher: Any) -> None:
    """End a run, unless a later one has begun."""
    if base.current_patcher is patcher:
        end_run(base)
