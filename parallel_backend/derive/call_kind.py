"""Kinds of model calls: a declaration that was proved for one kind is used for no other kind.

A kind holds the names of all conditioning, the type and dimensions of each tensor, flags, words and whole numbers, and whether
a mask hides anything. A kind leaves sizes out: whole numbers that change with the latent's size, and the length of a dimension
unless the length is 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec
from torch import Tensor

from ..conditioning import OPTIONS, Conditioning, flatten
from ..diffusion import Value
from ..errors import Refused

MASK = "mask"
"""A part of the name of each tensor that hides tokens."""

LATENT = "x"


class CallKind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A kind of model call.

    Attributes:
        tensors: by name, in order: the kind of number, and for each dimension after the first, 1 or n.
        values: the other conditioning, by name. A float is only "a number".
        sizes: names of `values` that change with the size. Comparisons ignore these values.
        options: names of options that the model's class adds to each call. Comparisons ignore these options.
    """

    tensors: tuple[tuple[str, str], ...]
    values: tuple[tuple[str, bool | int | str], ...]
    sizes: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    def difference(self, kind: CallKind) -> str:
        """Return in words the first difference between this kind and another; empty if the kinds are equal."""
        sizes, added = {*self.sizes, *kind.sizes}, {*self.options, *kind.options}
        for mine, its in (
            (dict(self.tensors), dict(kind.tensors)),
            (self._compared(sizes, added), kind._compared(sizes, added)),
        ):
            for name in sorted(mine.keys() | its.keys()):
                if name not in mine:
                    return f"{name} in the conditioning"
                if name not in its:
                    return f"conditioning without {name}"
                if type(mine[name]) is not type(its[name]) or mine[name] != its[name]:
                    return f"{name} in the conditioning ({its[name]} where it was {mine[name]})"
        return ""

    def with_sizes(self, kinds: Iterable[CallKind]) -> CallKind:
        """Return this kind, with each whole number that differs in calls of other sizes marked as a size."""
        sizes = set(self.sizes)
        for kind in kinds:
            its = dict(kind.values)
            sizes |= {name for name, value in self.values if type(value) is int and its.get(name, value) != value}
        return msgspec.structs.replace(self, sizes=tuple(sorted(sizes)))

    def with_options(self, options: Mapping[str, Any]) -> CallKind:
        """Return this kind with the names of the plain options that the model's class added to a call."""
        added: dict[str, Value] = {}
        for name, value in options.items():
            with contextlib.suppress(Refused):
                flatten(f"{OPTIONS}.{name}", value, {}, added)
        return msgspec.structs.replace(self, options=tuple(sorted(added)))

    def _compared(self, sizes: Collection[str], added: Collection[str]) -> dict[str, bool | int | str]:
        return {name: "a size" if name in sizes else value for name, value in self.values if name not in added}


def kind_of(latent: Tensor, conditioning: Conditioning) -> CallKind:
    """Return the kind of a call with this latent and conditioning. The names are the model's."""
    tensors = {**conditioning.tensors, LATENT: latent}
    return CallKind(
        tuple((name, _of_tensor(name, tensors[name])) for name in sorted(tensors)),
        tuple((name, _of_value(value)) for name, value in sorted(conditioning.values.items()) if value is not None),
    )


def _of_tensor(name: str, tensor: Tensor) -> str:
    numbers = "fraction" if tensor.is_floating_point() else "flag" if tensor.dtype.is_signed is False else "whole"
    dims = "x".join(["rows", *("1" if size == 1 else "n" for size in tensor.shape[1:])])
    hides = MASK in name and tensor.ndim == 2 and not bool((tensor == 1).all())
    return f"{numbers} {dims}{', hiding some' if hides else ''}"


def _of_value(value: Value) -> bool | int | str:
    if isinstance(value, float):
        return "a number"
    assert value is not None
    return value
