"""Record operations on latents stacked along a new dimension, as multistep samplers stack their history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ....parallel_backend.denoise.program import Argument, Ref, StackWeights
from .latent import Deviation, Recorded, spoilt
from .tape import Cell, Tape


def stacked(tape: Tape, parts: Sequence[Any], dim: int = 0) -> Recorded:
    """Record torch.stack of latents, and return its result."""
    if not all(isinstance(part, Recorded) and not part.cell.count for part in parts):
        raise tape.refuse("stacks the latent with other tensors")
    first = parts[0]
    dim %= first.ndim + 1
    shape = [*first.shape[:dim], len(parts), *first.shape[dim:]]
    if any(part.shape != tape.shape or part.dtype != first.dtype for part in parts):
        raise tape.refuse("stacks latents of different shapes or dtypes")
    if reason := next((part.cell.spoilt for part in parts if part.cell.spoilt), ""):
        return spoilt(tape, reason, shape, first.dtype)
    value = tape.operation("stack", [Ref(part.cell.value) for part in parts], {"dim": dim})
    return Recorded(tape, Cell(value, count=len(parts), dim=dim), shape, first.dtype)


def of_stack(tape: Tape, this: Recorded, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Record a selection or the sum along a stack's dimension; return None for any other operation."""
    stack, ndim = this.cell, this.ndim

    def latent(name: str, *arguments: Argument) -> Recorded:
        return Recorded(tape, Cell(tape.operation(name, (Ref(stack.value), *arguments))), tape.shape, this.dtype)

    if name == "select" and args[1] % ndim == stack.dim:
        return latent("select", stack.dim, args[2] % stack.count)
    if name == "unbind" and (args[1] if len(args) > 1 else 0) % ndim == stack.dim:
        return [latent("select", stack.dim, index) for index in range(stack.count)]
    if name == "sum" and len(args) == 2 and not kwargs and [dim % ndim for dim in args[1]] == [stack.dim]:
        return latent("sum", stack.dim)
    return None


def combined(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Recorded | None:
    """Record a sum of stacked latents with plain weights, and return its result; None for any other operation."""
    if func is torch.einsum:
        formula, *operands = args
        operands = list(operands[0]) if len(operands) == 1 else operands
        axes = _einsum_axes(formula, operands)
    else:
        operands = list(args[:2])
        dims = kwargs.get("dims", args[2] if len(args) > 2 else None)
        pairs = (
            [list(operand_dims) for operand_dims in dims] if isinstance(dims, list | tuple) and len(dims) == 2 else []
        )
        axes = (
            [operand_dims[0] for operand_dims in pairs] if all(len(operand_dims) == 1 for operand_dims in pairs) else []
        )
    if len(operands) != 2 or len(axes) != 2:
        return None
    (stack, dim), (weights, _) = sorted(
        zip(operands, axes, strict=True), key=lambda pair: not isinstance(pair[0], Recorded)
    )
    if not isinstance(stack, Recorded) or isinstance(weights, Recorded | Deviation) or weights.ndim != 1:
        return None
    tape, cell = stack.tape, stack.cell
    if not cell.count or dim % stack.ndim != cell.dim or len(weights) != cell.count or weights.dtype != stack.dtype:
        return None
    if cell.spoilt:
        return spoilt(tape, cell.spoilt, tape.shape, stack.dtype)
    along = StackWeights(tape.weigh(weights.tolist(), weights.dtype), cell.dim)
    return Recorded(tape, Cell(tape.operation("combine", (Ref(cell.value), cell.dim, along))), tape.shape, stack.dtype)


def _einsum_axes(formula: Any, operands: Sequence[Any]) -> list[int]:
    """Return the position of the summed letter in each of two operands.

    Return an empty list unless one letter is summed and all others keep their order.
    """
    if not isinstance(formula, str) or len(operands) != 2:
        return []
    inputs, _, output = formula.replace(" ", "").partition("->")
    letters = inputs.split(",")
    vector = min(letters, key=len)
    if len(letters) != 2 or len(vector) != 1 or max(letters, key=len).replace(vector, "", 1) != output:
        return []
    return [letters_of_operand.index(vector) for letters_of_operand in letters]
