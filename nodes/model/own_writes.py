"""The attributes of a diffusion model that ComfyUI's own code writes before a run, found on a copy that no pack has seen."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import comfy.model_patcher
from torch import nn

from ...parallel_backend.models.comfyui.model_run import PATCHER, has_setter
from .own_code import own

Parts = Mapping[tuple[str, str], Any]
"""The parts of a module, by names, as `unchanged` takes them."""

PLAIN = (bool, int, float, str, type(None))
"""Types whose values are compared. An object of another type that is written stays refused: a pack may have put it there."""

NOTHING: Mapping[str, Mapping[str, Any]] = MappingProxyType({})


class OwnWrites:
    """Finds what ComfyUI's own code writes into a diffusion model before a run.

    A class of ComfyUI's may write where its BaseModel is given the patcher of a run: Qwen-Image 2.1 turns the cache of its
    prompt on there. The workers make the same call (`model_run.py`), so an attribute with the value written there is no change
    by a pack.

    Args:
        modules: the path of each of the diffusion model's modules, the module, and the parts that it was built with.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module, Parts]]) -> None:
        self._modules = [*modules]
        self._patcher: weakref.ref[Any] | None = None
        self._written = NOTHING

    def of(self, model: Any) -> Mapping[str, Mapping[str, Any]]:
        """Return the values that ComfyUI's own code has written for the run that goes on, by module path and attribute.

        Args:
            model: the BaseModel that is sampled, or None for an autoencoder.
        """
        patcher = getattr(model, PATCHER, None)
        if patcher is None or not _own_setter(model):
            return NOTHING
        if self._patcher is None or self._patcher() is not patcher:
            self._written = self._write(model, patcher)
            self._patcher = weakref.ref(patcher)
        return self._written

    def _write(self, model: Any, patcher: Any) -> Mapping[str, Mapping[str, Any]]:
        """Run ComfyUI's pre-run code on an untouched copy of a model; return the values that differ afterwards."""
        copies = {path: _copy(module, parts) for path, module, parts in self._modules}
        by_original = {id(module): copies[path] for path, module, _ in self._modules}
        for each in copies.values():
            each._modules = {name: by_original.get(id(inside), inside) for name, inside in each._modules.items()}
        twin = copy.copy(model)
        twin._modules = {**model._modules, "diffusion_model": copies[""]}
        before = {path: {**vars(module)} for path, module in copies.items()}
        comfy.model_patcher.ModelPatcher.pre_run(PatcherOfCopy(patcher, twin))
        written = {
            path: {
                name: value
                for name, value in vars(module).items()
                if before[path].get(name, before) is not value and isinstance(value, (*PLAIN, PatcherOfCopy))
            }
            for path, module in copies.items()
        }
        return {path: values for path, values in written.items() if values}


class PatcherOfCopy:
    """A run's patcher as ComfyUI's pre-run code sees it: of a copy of the model, without the callbacks of nodes."""

    def __init__(self, patcher: Any, model: Any) -> None:
        self.model = weakref.proxy(model)
        self.original = weakref.ref(patcher)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original(), name)

    def get_all_callbacks(self, *_: Any) -> list[Any]:
        """Return none: what nodes' callbacks write is not ComfyUI's own."""
        return []


def is_written(value: Any, written: Any) -> bool:
    """Return whether an attribute has the value that was written into the copy's."""
    if isinstance(written, PatcherOfCopy):
        return value is written.original()
    return type(value) is type(written) and bool(value == written)


def _own_setter(model: Any) -> bool:
    """Return whether a model's class has a setter for its patcher, and it and the code that calls it are ComfyUI's own."""
    if not has_setter(model) or not own(comfy.model_patcher.ModelPatcher.pre_run):
        return False
    return own(inspect.getattr_static(type(model), PATCHER).fset)


def _copy(module: nn.Module, parts: Parts) -> Any:
    """Return a module with the parts that it was built with; the modules in it are still the original's."""
    made: Any = object.__new__(parts["__class__", ""])
    tables: dict[str, Any] = {
        name: {} for name, value in vars(module).items() if name.startswith("_") and isinstance(value, dict)
    }
    made.__dict__ = {"training": module.training, **tables}
    for (name, key), value in parts.items():
        if key:
            made.__dict__.setdefault(name, {})[key] = value
        elif name != "__class__":
            made.__dict__[name] = value
    return made
