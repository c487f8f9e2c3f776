"""A sampler as a program: the operations of one of ComfyUI's sampling functions, in order, as data that any rank can replay.

Values are numbered in order of their creation. Value 0 is the noisy latent at the first sigma. Every operation and draw makes
one value. A model evaluation makes the denoised latent and, if the sampler uses them, the positive and the negative branch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

import msgspec
import torch
from torch import Tensor


class Ref(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag=True):
    """A reference to a value by its number."""

    value: int


class StackWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag=True):
    """A reference to one of the program's `weights`, which has one number per latent along dimension `dim` of a stack."""

    weights: int
    dim: int


Argument = Ref | StackWeights | bool | int | float | str | None


class ProgramEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag=True):
    """The base class of a program's entries."""


class Operation(ProgramEntry, frozen=True):
    """An operation that makes a value from other values. `function_of` returns the function of a name."""

    name: str
    arguments: tuple[Argument, ...]
    keywords: dict[str, Argument] = {}


class Draw(ProgramEntry, frozen=True):
    """A draw of fresh noise from a source, for the step from sigma `start` to sigma `end`.

    A draw comes after the first model evaluation, because only the last stage draws. If `clip` is not 0, the noise is clamped
    to that many of its own standard deviations.
    """

    source: int
    start: float
    end: float
    clip: float = 0.0


class ModelEvaluation(ProgramEntry, frozen=True):
    """A model evaluation of value `x` at `sigma`. It makes the denoised latent, and with `sides` also the two branches."""

    x: int
    sigma: float
    sides: bool = False


class StepEvent(ProgramEntry, frozen=True):
    """The report of a step to the user, with the numbers of the two values that it shows."""

    step: int
    x: int
    denoised: int


class Weights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One number for each latent of a stack."""

    numbers: tuple[float, ...]
    dtype: str
    """The numbers' dtype, by torch's name."""


class NoiseSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A source of noise.

    Attributes:
        kind: `gaussian` noise is independent in each draw. `brownian` noise is the increments of one path over sigmas.
        seed: the seed of the run.
        low: the smallest sigma of the path.
        high: the largest sigma of the path.
        on_cpu: the path is drawn on the CPU, not on the latent's device.
    """

    kind: Literal["gaussian", "brownian"]
    seed: int
    low: float = 0.0
    high: float = 0.0
    on_cpu: bool = True


class CallInfo(NamedTuple):
    """One model call: its sigma (0-dim fp32 on the CPU), its step, and True if the call is the first of the step."""

    sigma: Tensor
    step: int
    opens_step: bool


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The program of a sampler, from the noisy latent to the value `result`. `name` is the sampler's name for the user."""

    name: str
    entries: tuple[Operation | Draw | ModelEvaluation | StepEvent, ...]
    result: int
    weights: tuple[Weights, ...] = ()
    sources: tuple[NoiseSource, ...] = ()

    @property
    def shows_steps(self) -> bool:
        """Return True if the sampler reports its steps. Otherwise each model call counts as a step."""
        return any(isinstance(entry, StepEvent) for entry in self.entries)

    def calls(self) -> list[CallInfo]:
        """Return all model calls, which are known before the run.

        The last call before a step event opens that step. Steps are counted from 0, whatever numbers the events have.
        """
        number, opening = -1, list[int]()
        for entry in self.entries:
            number += isinstance(entry, ModelEvaluation)
            if isinstance(entry, StepEvent) and number >= 0 and number not in opening[-1:]:
                opening.append(number)
        sigmas = [torch.tensor(entry.sigma) for entry in self.entries if isinstance(entry, ModelEvaluation)]
        if not opening:
            return [CallInfo(sigma, step, True) for step, sigma in enumerate(sigmas)]
        steps = {call: step for step, call in enumerate(opening)}
        calls, step = list[CallInfo](), 0
        for number, sigma in enumerate(sigmas):
            step = steps.get(number, step)
            calls.append(CallInfo(sigma, step, number in steps))
        return calls


def encoded(program: Program) -> Tensor:
    """Return the program as bytes (1-D uint8), for a request."""
    return torch.frombuffer(bytearray(msgspec.msgpack.encode(program)), dtype=torch.uint8)


def view_along(weights: Weights, along: StackWeights, ndim: int) -> Tensor:
    """Return the weights as a CPU tensor that broadcasts with a stack of latents.

    Args:
        weights: the numbers.
        along: the reference that uses them.
        ndim: the number of a latent's dimensions; a stack has one more.
    """
    shape: Sequence[int] = [len(weights.numbers) if dim == along.dim else 1 for dim in range(ndim + 1)]
    return torch.tensor(weights.numbers, dtype=getattr(torch, weights.dtype)).view(shape)


_NUMBERS_ANYWHERE = ("pow",)
_FIRST_A_TENSOR = (
    *("neg", "abs", "sign", "square", "sqrt", "rsqrt", "reciprocal", "exp", "exp2", "expm1", "log", "log2", "log10"),
    *("log1p", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf"),
    *(
        "sigmoid",
        "logit",
        "relu",
        "floor",
        "ceil",
        "trunc",
        "round",
        "frac",
        "nan_to_num",
        "isnan",
        "isinf",
        "isfinite",
    ),
    *("clamp", "clamp_min", "clamp_max", "add", "sub", "rsub", "mul", "div", "fmod", "remainder", "copysign"),
    *("eq", "ne", "lt", "le", "gt", "ge", "logical_not", "bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor"),
    *("where", "sgn", "floor_divide"),
)
_TWO_TENSORS = (
    *("maximum", "minimum", "fmax", "fmin", "masked_fill", "atan2", "hypot", "lerp"),
    *("logical_and", "logical_or", "logical_xor"),
)
_THREE_TENSORS = ("addcmul", "addcdiv")

ELEMENTWISE: Mapping[str, int] = MappingProxyType(
    dict.fromkeys(_NUMBERS_ANYWHERE, 0)
    | dict.fromkeys(_FIRST_A_TENSOR, 1)
    | dict.fromkeys(_TWO_TENSORS, 2)
    | dict.fromkeys(_THREE_TENSORS, 3)
)
"""Torch's names of elementwise operations, with the number of leading arguments that torch wants as tensors."""

KEYWORDS = ("alpha", "rounding_mode", "min", "max", "nan", "posinf", "neginf", "value", "decimals", "eps")
"""Keyword arguments that an elementwise operation may have."""

DTYPES = ("float16", "bfloat16", "float32", "float64", "int32", "int64", "bool")


def _to(value: Tensor, dtype: str) -> Tensor:
    return value.to(getattr(torch, dtype))


def _full_like(value: Tensor, number: float) -> Tensor:
    return torch.full_like(value, number)


def _stack(*values: Tensor, dim: int) -> Tensor:
    return torch.stack(values, dim=dim)


def _sum(stack: Tensor, dim: int) -> Tensor:
    return stack.sum(dim=dim)


def _select(stack: Tensor, dim: int, index: int) -> Tensor:
    return stack.select(dim, index)


def _combine(stack: Tensor, dim: int, weights: Tensor) -> Tensor:
    return torch.tensordot(stack, weights.flatten(), dims=([dim], [0]))


OTHERS: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {"to": _to, "full_like": _full_like, "stack": _stack, "sum": _sum, "select": _select, "combine": _combine}
)
"""The functions of operations that have no function of that name in torch, or one with other arguments."""


def function_of(name: str) -> Callable[..., Tensor]:
    """Return the function that computes an operation."""
    return OTHERS[name] if name in OTHERS else getattr(torch, name)
