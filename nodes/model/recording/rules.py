"""Rules for torch's operations on a recorded latent: each becomes an entry of the program, or a refusal with a reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ....parallel_backend.denoise.program import ELEMENTWISE, Ref
from .elementwise import elementwise
from .latent import OWN_NOISE, Deviation, Recorded, copied, number_of, plain_number, spoilt, tape_of, word_of
from .stacks import combined, of_stack, stacked
from .tape import Cell, Tape

ONE_MEMORY = ("detach", "alias", "lift_fresh", "view", "_unsafe_view", "reshape", "expand", "slice")
"""Operations whose result shares the latent's memory, and equals the latent if the shape stays the same."""

COPIES = ("clone", "_to_copy")

FILLED = {"zeros_like": 0.0, "ones_like": 1.0, "new_zeros": 0.0, "new_ones": 1.0, "full_like": None, "new_full": None}
"""Operations that make a tensor of one number, with that number; None if the number is an argument."""


class RecordingRules:
    """The rules for torch's functions on recorded latents, in the form of `tape.Rules`."""

    def before(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Record a weighted sum of stacked latents as one operation, not as torch's many; return None for other functions."""
        return combined(func, args, kwargs) if func in (torch.tensordot, torch.einsum) else None

    def done(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Record one operation of torch's and return its result."""
        return _done(tape_of(args, kwargs), func, args, kwargs)


def _done(tape: Tape, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Record one operation of torch's and return its result."""
    name = func.overloadpacket.__name__
    this = args[0] if args else None
    if torch.Tag.nondeterministic_seeded in func.tags:
        if isinstance(this, Recorded) and not name.endswith("_"):
            return spoilt(tape, OWN_NOISE, this.shape, this.dtype)
        raise tape.refuse(OWN_NOISE)
    if name == "stack":
        return stacked(tape, *args, **kwargs)
    if isinstance(this, Recorded):
        if name in ONE_MEMORY:
            return _same_memory(tape, func, name, args, kwargs)
        if name in COPIES:
            return copied(tape, this, kwargs.get("dtype") or this.dtype)
        if name in FILLED or name in ("new_empty", "empty_like", "new_empty_strided"):
            return _filled(tape, this, name, args, kwargs)
        if name in ("copy_", "fill_", "zero_"):
            return _overwritten(tape, this, args[1] if len(args) > 1 else 0.0)
        if name == "std" and this.cell.drawn is not None and len(args) == 1 and kwargs in ({}, {"correction": 1}):
            return Deviation(tape, this.cell, 1.0, this.dtype)
        if (
            this.cell.count
            and not this.cell.spoilt
            and (result := of_stack(tape, this, name, args, kwargs)) is not None
        ):
            return result
        if name == "clamp" and any(isinstance(argument, Deviation) for argument in args):
            return _clipped(tape, this, *args[1:])
    if name.rstrip("_") in ELEMENTWISE and func._overloadname != "out":
        return elementwise(tape, func, name, args, kwargs)
    result = func.decompose(*args, **kwargs) if torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"
    ) else NotImplemented  # fmt: skip
    if result is NotImplemented:
        raise tape.refuse(word_of(name))
    return result


def _same_memory(tape: Tape, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Recorded:
    this: Recorded = args[0]
    meta = torch.empty(this.shape, dtype=this.dtype, device="meta")
    if func(meta, *args[1:], **kwargs).shape != this.shape:
        raise tape.refuse(word_of(name) if name == "slice" else f"changes the shape of the latent (torch's {name})")
    return Recorded(tape, this.cell, this.shape, this.dtype)


def _filled(tape: Tape, this: Recorded, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    dtype = kwargs.get("dtype") or this.dtype
    shape = tuple(args[1]) if name.startswith("new") else tuple(this.shape)
    number = FILLED.get(name) if name in FILLED else 0.0
    if number is None and (number := plain_number(args[-1])) is None:
        raise tape.refuse("fills a latent with a value that is not a number")
    if shape != tuple(tape.shape):
        return torch.full(shape, number, dtype=dtype)
    return Recorded(
        tape, Cell(tape.cast(tape.operation("full_like", (Ref(0), number)), tape.dtype, dtype)), shape, dtype
    )


def _overwritten(tape: Tape, this: Recorded, source: Any) -> Recorded:
    number = number_of(source)
    if isinstance(source, Recorded) and source.shape == this.shape:
        copy = copied(tape, source, this.dtype).cell
    elif number is not None:
        value = tape.operation("full_like", (Ref(0), number))
        copy = Cell(tape.cast(value, tape.dtype, this.dtype))
    else:
        raise tape.refuse("writes values into the latent that were not computed from it")
    this.cell.__dict__.update(vars(copy))
    return this


def _clipped(tape: Tape, noise: Recorded, low: Any = None, high: Any = None) -> Recorded:
    bounds = low, high
    if (
        not all(isinstance(bound, Deviation) and bound.cell is noise.cell for bound in bounds)
        or -low.times != high.times
    ):
        raise tape.refuse(word_of("std"))
    if noise.cell.drawn is None:
        raise tape.refuse("clamps noise that it has changed")
    if not high.times > 0:
        raise tape.refuse("clamps noise to a range without width")
    return Recorded(tape, tape.clip(noise.cell, high.times), noise.shape, noise.dtype)
