"""A latent without data that records elementwise operations, and refuses all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .tape import Cell, NotRecordable, Tape

READS = "reads values of the latent"

WORDS = {
    **dict.fromkeys(
        ("_local_scalar_dense", "is_nonzero", "equal", "__float__", "__int__", "__index__", "__bool__", "item"), READS
    ),
    **dict.fromkeys(("numpy", "tolist", "__array__", "data_ptr", "untyped_storage", "storage", "__reduce_ex__"), READS),
    **dict.fromkeys(("linalg_vector_norm", "norm"), "takes a norm of the latent"),
    **dict.fromkeys(("slice", "select", "index", "unbind", "split", "narrow"), "takes a part of the latent"),
    **dict.fromkeys(("std", "var", "mean", "sum", "max", "min", "amax", "amin"), "takes a statistic of the latent"),
}
"""Clauses for refused operations, by torch's names, in the user's words. Any other operation is refused by torch's name."""

OWN_NOISE = "draws noise of its own"


class Recorded(torch.Tensor):
    """A tensor with a shape and a dtype whose values are results of a program that is being recorded."""

    tape: Tape
    cell: Cell

    @staticmethod
    def __new__(cls, tape: Tape, cell: Cell, shape: Sequence[int], dtype: torch.dtype) -> Recorded:
        tensor = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=torch.device("cpu"))
        tensor.tape, tensor.cell = tape, cell
        return tensor

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Recorded({tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: object) -> Recorded:
        return copied(self.tape, self, self.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            tape = tape_of(args, kwargs)
            if (result := tape.rules.before(func, args, kwargs)) is not None:
                return result
            try:
                return func(*args, **kwargs)
            except Exception:
                raise tape.refuse(word_of(getattr(func, "__name__", str(func)))) from None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tape = tape_of(args, kwargs)
        tape.look()
        return tape.rules.done(func, args, kwargs)


class Deviation(torch.Tensor):
    """A number of standard deviations of fresh noise, 0-dim. It can only be used to clamp that noise."""

    tape: Tape
    cell: Cell
    times: float

    @staticmethod
    def __new__(cls, tape: Tape, cell: Cell, times: float, dtype: torch.dtype) -> Deviation:
        tensor = torch.Tensor._make_wrapper_subclass(cls, (), dtype=dtype, device=torch.device("cpu"))
        tensor.tape, tensor.cell, tensor.times = tape, cell, times
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tape, name = tape_of(args, kwargs), func.overloadpacket.__name__
        ours = [argument for argument in args if isinstance(argument, cls)]
        numbers = [number for argument in args if (number := plain_number(argument)) is not None]
        if any(isinstance(argument, Recorded) for argument in args):
            return tape.rules.done(func, args, kwargs)
        if len(ours) == 1 and len(ours) + len(numbers) == len(args) and not kwargs:
            this = ours[0]
            if name == "neg":
                return cls(tape, this.cell, -this.times, this.dtype)
            if name == "mul" and numbers:
                return cls(tape, this.cell, this.times * numbers[0], this.dtype)
            if name in ("detach", "alias", "clone"):
                return this
        raise tape.refuse(word_of("std"))


def spoilt(tape: Tape, reason: str, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> Recorded:
    """Return a latent that code may hold. Using its value raises a refusal with this reason."""
    return Recorded(tape, Cell(-1, spoilt=reason), tape.shape if shape is None else shape, dtype or tape.dtype)


def value_of(latent: Any, what: str) -> int:
    """Return the number of the program value for a latent of the run's shape, cast to the run's dtype.

    Args:
        latent: the latent.
        what: the use of the latent, for the refusal, such as "returns".

    Raises:
        NotRecordable: the latent is not recorded, has another shape, or must not be used.
    """
    if not isinstance(latent, Recorded):
        raise NotRecordable(f"{what} a tensor that was not computed from the latent")
    tape, cell = latent.tape, latent.cell
    if cell.spoilt:
        raise tape.refuse(cell.spoilt)
    if latent.shape != tape.shape or cell.count:
        raise tape.refuse(f"{what} a latent of a different shape")
    return tape.cast(cell.value, latent.dtype, tape.dtype)


def number_of(value: Any) -> float | int | bool | None:
    """Return the number that a plain value, or every element of a plain tensor, has; None if there is none."""
    if isinstance(value, Tensor):
        if isinstance(value, Recorded | Deviation) or value.numel() == 0:
            return None
        first = value.detach().flatten()[0]
        is_uniform = value.numel() == 1 or bool(((value == first) | (value.isnan() & first.isnan())).all())
        return first.item() if is_uniform else None  # type: ignore[no-any-return]
    return plain_number(value)


def plain_number(value: Any) -> float | int | bool | None:
    """Return the value as a number if it is a number or a plain tensor of one element; None otherwise."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Tensor) and not isinstance(value, Recorded | Deviation) and value.numel() == 1:
        value = value.item()
    return value if isinstance(value, bool | int | float) else None


def tape_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tape:
    """Return the tape of the first recorded latent among some arguments."""
    for argument in (*args, *kwargs.values()):
        for value in argument if isinstance(argument, list | tuple) else (argument,):
            if isinstance(value, Recorded | Deviation):
                return value.tape
    raise AssertionError("no argument is a recorded latent")


def word_of(name: str) -> str:
    """Return the clause that says why an operation is refused, by torch's name for it."""
    return WORDS.get(name.rstrip("_") if name not in WORDS else name, f"calls torch's {name} on the latent")


def copied(tape: Tape, this: Recorded, dtype: torch.dtype) -> Recorded:
    """Return another latent of the same values, in the given dtype."""
    cell = this.cell
    if cell.spoilt:
        return spoilt(tape, cell.spoilt, this.shape, dtype)
    value = tape.cast(cell.value, this.dtype, dtype)
    drawn = cell.drawn if value == cell.value else None
    return Recorded(tape, Cell(value, drawn=drawn, count=cell.count, dim=cell.dim), this.shape, dtype)
