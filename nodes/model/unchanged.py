"""The inside of a diffusion model or an autoencoder as other packs find it: to be looked at, and refused when it was changed.

Nothing that is changed there reaches the workers, nor in the functions that its classes use.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ...parallel_backend.models.comfyui.content.model_code import classes_of
from ...parallel_backend.models.comfyui.content.replaced import ReachedCode
from .own_code import is_own_method
from .own_writes import NOTHING, OwnWrites, is_written
from .refusals import MODEL, VAE, Guarded

VIEWS = {"data", "real", "imag", "T", "H", "mT", "mH"}
"""Attributes of a tensor that are its values."""

ASKED = {"size", "dim", "numel", "nelement", "element_size", "stride", "is_contiguous", "is_floating_point", "is_complex"} | {
    "__repr__", "__hash__", "__len__", "requires_grad_"
}  # fmt: skip
"""Methods that ask for no values."""


PACKS = "custom_nodes"

STATISTICS = 2**16
"""The most values of a buffer that are compared one by one."""


class RemoteWeight(nn.Parameter):
    """A weight whose values are in the workers: has a shape and a dtype, and refuses to be read or changed."""

    guarded = MODEL

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.detach:  # as state_dict does
            return args[0]
        attribute = getattr(getattr(func, "__self__", None), "__name__", None)  # of a descriptor's __get__ or __set__
        if func.__name__ not in ASKED and (attribute is None or attribute in VIEWS):
            raise cls.guarded.refusal("Reading or changing the weights")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteWeight:
        """Another weight of the same shape, whose values are the same ones in the workers."""
        with torch._C.DisableTorchFunctionSubclass():
            copied = torch.Tensor._make_subclass(type(self), self.data)
        memo[id(self)] = copied
        return copied  # type: ignore[return-value]


class RemoteVAEWeight(RemoteWeight):
    """A weight of an autoencoder."""

    guarded = VAE


WEIGHTS = {MODEL: RemoteWeight, VAE: RemoteVAEWeight}


class SkeletonSnapshot:
    """The modules, weights, hooks and methods of a diffusion model or an autoencoder.

    Args:
        skeleton: the module as it should be; its weights become RemoteWeights.
        guarded: what refusals say of it.
    """

    def __init__(self, skeleton: nn.Module, guarded: Guarded = MODEL) -> None:
        self._guarded = guarded
        for module in skeleton.modules():
            for name, weight in module._parameters.items():
                if weight is not None and not isinstance(weight, RemoteWeight):  # of a copy they are
                    module._parameters[name] = torch.Tensor._make_subclass(WEIGHTS[guarded], weight.data)  # type: ignore[assignment]
        self._originals = [
            (name, module, _signature(module), dict(_parts(module))) for name, module in skeleton.named_modules()
        ]
        self._buffers = [
            (name, values, values.clone())
            for name, values in skeleton.named_buffers()
            if not values.is_meta and values.numel() <= STATISTICS
        ]
        self._classes = classes_of(skeleton)
        self.own_writes = OwnWrites((name, module, parts) for name, module, _, parts in self._originals)

    def refuse_changes(self, written: Mapping[str, Mapping[str, Any]] = NOTHING) -> None:
        """Raise Refused if a module, weight, hook, method or reachable function is not the original one.

        Args:
            written: the values that ComfyUI's own code has written since construction, by module path and attribute name.
        """
        refuse_replaced(self._classes, self._guarded)
        for name, module, signature, original in self._originals:
            of_module = written.get(name, {})
            if not of_module and _signature(module) == signature:
                continue
            for part in _differing(module, original, of_module):
                where = ".".join(filter(None, (self._guarded.inside, name, part)))
                raise self._guarded.refusal(f"Changing {where}")
        for name, values, original_values in self._buffers:
            if not torch.equal(values, original_values):
                raise self._guarded.refusal(f"Changing {self._guarded.inside}.{name}")


def refuse_replaced(classes: frozenset[type], guarded: Guarded = MODEL) -> None:
    """Raise Refused if code that these classes reach in this process is not what ComfyUI's source, or a library's, says."""
    if replaced := _code_of(classes).replaced():
        raise guarded.refuse_replaced(replaced.name, _in_words(replaced.by))


@functools.lru_cache(16)
def _code_of(classes: frozenset[type]) -> ReachedCode:
    return ReachedCode(classes)


def _in_words(file: str) -> str:
    """Return a file path as a user knows it: the path of a pack's file starts at ComfyUI's folder of packs."""
    _, separator, rest = file.rpartition(f"{os.sep}{PACKS}{os.sep}")
    return f"{PACKS}{os.sep}{rest}" if separator else file


def _signature(module: nn.Module) -> list[int]:
    """Differs where a part is another object; quick, as it is looked at before every forward."""
    tables = vars(module).values()
    parts = (id(part) for table in tables if isinstance(table, dict) for part in table.values())
    return [id(type(module)), *map(id, tables), *parts]


def _parts(module: nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    """All that a module has, by names; entries of torch's own tables one by one."""
    yield ("__class__", ""), type(module)
    for name, value in vars(module).items():
        if name.startswith("_") and isinstance(value, dict):
            yield from (((name, str(key)), part) for key, part in value.items())
        elif name != "training":
            yield (name, ""), value


def _differing(module: nn.Module, original: dict[tuple[str, str], Any], written: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of changed attributes: neither the value at construction nor the value that ComfyUI's own code wrote.

    Args:
        original: the module's attributes at construction.
        written: the values that ComfyUI's own code has written, by attribute name.
    """
    parts = dict(_parts(module))
    for (table, name), value in parts.items():
        if not name and table in written:
            same = is_written(value, written[table])
        elif (table, name) in original:
            same = value is original[table, name]
        else:  # data that no code of the model's reads, or a method that was put back
            same = not name and (not hasattr(type(module), table) or is_own_method(module, table))
        if not same:
            yield "forward" if "hooks" in table else name or table
    yield from (name or table for table, name in original.keys() - parts.keys())
