"""Check a diffusion model or an autoencoder for changes by other packs, and refuse a changed one.

Other packs can read the proxy's modules. Changes to the modules, or to functions that their classes use, never reach the
workers.
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
"""Attributes of a tensor that give its values."""

SHAPE_QUERIES = {
    *("size", "dim", "numel", "nelement", "element_size", "stride", "is_contiguous", "is_floating_point", "is_complex"),
    *("__repr__", "__hash__", "__len__", "requires_grad_"),
}
"""Methods of a tensor that do not read its values."""


PACKS = "custom_nodes"

STATISTICS = 2**16
"""Largest number of values of a buffer for which the buffer is compared value by value."""


class RemoteWeight(nn.Parameter):
    """A weight whose values are in the workers. The weight has a shape and a dtype, and refuses reads and changes."""

    guarded = MODEL

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.detach:  # state_dict calls it
            return args[0]
        attribute = getattr(getattr(func, "__self__", None), "__name__", None)  # of a descriptor's get or set
        if func.__name__ not in SHAPE_QUERIES and (attribute is None or attribute in VIEWS):
            raise cls.guarded.refusal("Reading or changing the weights")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteWeight:
        """Return another weight of the same shape, which stands for the same values in the workers."""
        with torch._C.DisableTorchFunctionSubclass():
            copied = torch.Tensor._make_subclass(type(self), self.data)
        memo[id(self)] = copied
        return copied  # type: ignore[return-value]


class RemoteVAEWeight(RemoteWeight):
    """A weight of an autoencoder whose values are in the workers."""

    guarded = VAE


WEIGHTS = {MODEL: RemoteWeight, VAE: RemoteVAEWeight}


class SkeletonSnapshot:
    """The modules, weights, hooks and methods of a diffusion model or an autoencoder, recorded at construction.

    Args:
        skeleton: the module as built; its weights become RemoteWeights.
        guarded: the names for refusals.
    """

    def __init__(self, skeleton: nn.Module, guarded: Guarded = MODEL) -> None:
        self._guarded = guarded
        for module in skeleton.modules():
            for name, weight in module._parameters.items():
                if weight is not None and not isinstance(weight, RemoteWeight):  # a copied module has them already
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
    """Raise Refused if code that these classes reach in this process differs from the source of ComfyUI or of a library."""
    if replaced := _code_of(classes).replaced():
        raise guarded.refuse_replaced(replaced.name, _in_words(replaced.by))


@functools.lru_cache(16)
def _code_of(classes: frozenset[type]) -> ReachedCode:
    return ReachedCode(classes)


def _in_words(file: str) -> str:
    """Return a file path for the user. The path of a pack's file starts at ComfyUI's folder of packs."""
    _, separator, rest = file.rpartition(f"{os.sep}{PACKS}{os.sep}")
    return f"{PACKS}{os.sep}{rest}" if separator else file


def _signature(module: nn.Module) -> list[int]:
    """Return the ids of all parts of a module, to find replaced parts.

    The check runs before every forward, so it must be fast.
    """
    tables = vars(module).values()
    parts = (id(part) for table in tables if isinstance(table, dict) for part in table.values())
    return [id(type(module)), *map(id, tables), *parts]


def _parts(module: nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield all parts of a module with their names. Entries of torch's own tables are parts of their own."""
    yield ("__class__", ""), type(module)
    for name, value in vars(module).items():
        if name.startswith("_") and isinstance(value, dict):
            yield from (((name, str(key)), part) for key, part in value.items())
        elif name != "training":
            yield (name, ""), value


def _differing(module: nn.Module, original: dict[tuple[str, str], Any], written: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of changed attributes: neither the value at construction nor the value that ComfyUI's own code wrote.

    Args:
        module: the module.
        original: the module's attributes at construction.
        written: the values that ComfyUI's own code has written, by attribute name.
    """
    parts = dict(_parts(module))
    for (table, name), value in parts.items():
        if not name and table in written:
            same = is_written(value, written[table])
        elif (table, name) in original:
            same = value is original[table, name]
        else:  # data that no code of the model reads, or a restored method
            same = not name and (not hasattr(type(module), table) or is_own_method(module, table))
        if not same:
            yield "forward" if "hooks" in table else name or table
    yield from (name or table for table, name in original.keys() - parts.keys())
