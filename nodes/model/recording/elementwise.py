"""Record operations that treat each element of a latent separately, with numbers and weights as further operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....parallel_backend.denoise.program import Argument, Ref, StackWeights
from .latent import Deviation, Recorded, copied, number_of, spoilt, word_of
from .tape import Cell, Tape

NOT_OF_THE_LATENT = "combines the latent with a tensor that was not computed from it"


def elementwise(tape: Tape, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Recorded:
    """Record an elementwise operation and return its result. An in-place operation replaces the latent's value."""
    latents = [latent for latent in (*args, *kwargs.values()) if isinstance(latent, Recorded)]
    if not latents:
        raise tape.refuse(word_of("std"))
    like = latents[0]
    in_place = name.endswith("_")
    if any(latent.cell.count != like.cell.count or latent.cell.dim != like.cell.dim for latent in latents):
        raise tape.refuse("combines latents that are stacked differently")
    if in_place and args[0] is not like:
        raise tape.refuse(NOT_OF_THE_LATENT)
    if any(latent.shape != like.shape for latent in latents):
        raise tape.refuse("combines latents of different shapes")
    dtype = _dtype(tape, func, args, kwargs)
    reason = next((latent.cell.spoilt for latent in latents if latent.cell.spoilt), "")
    if reason:
        result = spoilt(tape, reason, like.shape, dtype)
    else:
        promoted = dtype if dtype.is_floating_point and _promotes(like, args, dtype) else None
        argument = _Argument(tape, like, promoted)
        arguments = [argument(value) for value in args]
        keywords = {key: argument(value) for key, value in kwargs.items()}
        if name.rstrip("_") == "lerp" and not all(isinstance(operand, Ref) for operand in arguments[:2]):
            raise tape.refuse("interpolates between the latent and a number")
        value = tape.operation(name.rstrip("_"), arguments, keywords)
        result = Recorded(tape, Cell(value, count=like.cell.count, dim=like.cell.dim), like.shape, dtype)
    if not in_place:
        return result
    target: Recorded = args[0]
    target.cell.__dict__.update(vars(copied(tape, result, target.dtype).cell))
    return target


class _Argument:
    """A function that translates an operand into a program's argument: a value, a number, or weights over a stack."""

    def __init__(self, tape: Tape, like: Recorded, promoted: torch.dtype | None) -> None:
        self._tape = tape
        self._like = like
        self._promoted = promoted

    def __call__(self, operand: Any) -> Argument:
        tape = self._tape
        if isinstance(operand, Recorded):
            value = operand.cell.value
            return Ref(tape.cast(value, operand.dtype, self._promoted) if self._promoted else value)
        if isinstance(operand, Deviation):
            raise tape.refuse(word_of("std"))
        if isinstance(operand, Tensor):
            if _broadcast(operand, self._like) and (number := number_of(operand)) is not None:
                return number
            return self._along(operand)
        if operand is None or isinstance(operand, bool | int | float | str):
            return operand  # type: ignore[no-any-return]
        if isinstance(operand, np.generic):
            return operand.item()  # type: ignore[no-any-return]
        raise tape.refuse("combines the latent with an argument that is not a number")

    def _along(self, weights: Tensor) -> StackWeights:
        stack, ndim = self._like.cell, self._like.ndim
        shape = (1,) * (ndim - weights.ndim) + tuple(weights.shape)
        expected = tuple(stack.count if axis == stack.dim else 1 for axis in range(ndim))
        if not stack.count or shape != expected:
            raise self._tape.refuse(NOT_OF_THE_LATENT)
        return StackWeights(self._tape.weigh(weights.flatten().tolist(), weights.dtype), stack.dim)


def _broadcast(plain: Tensor, like: Recorded) -> bool:
    """Return True if a plain tensor broadcasts to the latent's shape."""
    try:
        return torch.broadcast_shapes(plain.shape, like.shape) == like.shape
    except RuntimeError:
        return False


def _promotes(like: Recorded, args: Sequence[Any], dtype: torch.dtype) -> bool:
    """Return True if a plain tensor with dimensions makes the result's dtype wider, as a number would not."""
    plain = any(
        isinstance(argument, Tensor) and not isinstance(argument, Recorded) and argument.ndim for argument in args
    )
    return plain and like.dtype.is_floating_point and dtype != like.dtype


def _dtype(tape: Tape, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of torch's result for operands of these dtypes."""

    def described(value: Any) -> object:
        return (value.dtype, min(value.ndim, 1)) if isinstance(value, Tensor) else type(value)

    key = func, *map(described, args), *((name, described(value)) for name, value in kwargs.items())
    if key not in tape.dtypes:

        def small(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return torch.ones((1,) * min(value.ndim, 1), dtype=value.dtype)

        result = func(*map(small, args), **{name: small(value) for name, value in kwargs.items()})
        tape.dtypes[key] = result.dtype
    return tape.dtypes[key]
