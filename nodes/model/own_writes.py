"""Attributes of a diffusion model that ComfyUI's own code writes before a run, found by running that code on a copy."""

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
"""The attributes of a module: (attribute, "") for a plain one, (table, key) for an entry of a dict such as `_parameters`."""

PLAIN = (bool, int, float, str, type(None))
"""Types that are compared by value. A written object of another type is refused, because a pack may have written it."""

NOTHING: Mapping[str, Mapping[str, Any]] = MappingProxyType({})


class OwnWrites:
    """The attribute values that ComfyUI's own code writes into a diffusion model before a run.

    A BaseModel may have a setter for `current_patcher`. ComfyUI calls the setter at the start of a run, and the setter may write
    into the diffusion model: that of Qwen-Image 2.1 turns its prefix cache on. Workers make the same call (`model_run.py`).
    So an attribute with a value of this kind is no change by another pack.

    Args:
        modules: for each module of the diffusion model: its path, the module, and its attributes at construction.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module, Parts]]) -> None:
        self._modules = [*modules]
        self._patcher: weakref.ref[Any] | None = None
        self._written = NOTHING

    def of(self, model: Any) -> Mapping[str, Mapping[str, Any]]:
        """Return the values written for the current run, by module path and attribute name; empty outside of a run.

        Args:
            model: the BaseModel that ComfyUI samples.
        """
        patcher = getattr(model, PATCHER, None)
        if patcher is None or not _own_setter(model):
            return NOTHING
        if self._patcher is None or self._patcher() is not patcher:
            self._written = self._write(model, patcher)
            self._patcher = weakref.ref(patcher)
        return self._written

    def _write(self, model: Any, patcher: Any) -> Mapping[str, Mapping[str, Any]]:
        """Run `ModelPatcher.pre_run` on a copy of the model as it was built, and return the attributes that changed."""
        copies = {path: _copy(module, parts) for path, module, parts in self._modules}
        by_original = {id(module): copies[path] for path, module, _ in self._modules}
        for duplicate in copies.values():
            duplicate._modules = {
                name: by_original.get(id(inside), inside) for name, inside in duplicate._modules.items()
            }
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
    """A stand-in for the patcher of a run: its model is a copy, and it has no callbacks of nodes.

    Args:
        patcher: the patcher of the run; all other attributes are read from it.
        model: the copy of the BaseModel.
    """

    def __init__(self, patcher: Any, model: Any) -> None:
        self.model = weakref.proxy(model)
        self.original = weakref.ref(patcher)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original(), name)

    def get_all_callbacks(self, *_: Any) -> list[Any]:
        """Return no callback: nodes of other packs register callbacks, and these may write attributes too."""
        return []


def is_written(value: Any, written: Any) -> bool:
    """Return True if an attribute's value equals the value that ComfyUI's code wrote into the copy of the model.

    Args:
        value: the attribute's value in the model.
        written: the value of the same attribute in the copy; a PatcherOfCopy stands for the patcher of the run.
    """
    if isinstance(written, PatcherOfCopy):
        return value is written.original()
    return type(value) is type(written) and bool(value == written)


def _own_setter(model: Any) -> bool:
    """Return True if the model's class has a setter for `current_patcher` and no other pack has replaced it or its caller."""
    if not has_setter(model) or not own(comfy.model_patcher.ModelPatcher.pre_run):
        return False
    return own(inspect.getattr_static(type(model), PATCHER).fset)


def _copy(module: nn.Module, parts: Parts) -> Any:
    """Return a new module with the attributes that the original had at construction.

    Args:
        module: the original. The copy shares its submodules.
        parts: the original's attributes at construction.
    """
    duplicate: Any = object.__new__(parts["__class__", ""])
    tables: dict[str, Any] = {
        name: {} for name, value in vars(module).items() if name.startswith("_") and isinstance(value, dict)
    }
    duplicate.__dict__ = {"training": module.training, **tables}
    for (name, key), value in parts.items():
        if key:
            duplicate.__dict__.setdefault(name, {})[key] = value
        elif name != "__class__":
            duplicate.__dict__[name] = value
    return duplicate
