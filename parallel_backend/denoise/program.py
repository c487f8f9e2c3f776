"""A sampler as a program: what one of ComfyUI's functions did to the latent, in order, as data that any rank can replay.

Values are numbered as they come: 0 is the noisy latent at the first sigma, and every operation and draw makes the next one,
a model call its denoised latent and, where they are used, the two sides it was made of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

import msgspec
import torch
from torch import Tensor


class Ref(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag=True):
    """The value of this number."""

    value: int


class StackWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag=True):
    """A vector of the program's `weights`, one for each latent of a stack along its dimension `dim`."""

    weights: int
    dim: int


Argument = Ref | StackWeights | bool | int | float | str | None


class ProgramEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag=True):
    """One thing that happens."""


class Operation(ProgramEntry, frozen=True):
    """Makes a value of others, by the name that `operations` has for it."""

    name: str
    arguments: tuple[Argument, ...]
    keywords: dict[str, Argument] = {}


class Draw(ProgramEntry, frozen=True):
    """Makes a value: fresh noise for the step from one sigma to another, from a source. It comes behind a model call, as only the
    last stage draws.

    With `clip` each draw is clamped to that many of its own standard deviations.
    """

    source: int
    start: float
    end: float
    clip: float = 0.0


class ModelEvaluation(ProgramEntry, frozen=True):
    """Makes the denoised latent that the model gives of `x` at `sigma`, and with `sides` the positive and the negative."""

    x: int
    sigma: float
    sides: bool = False


class StepEvent(ProgramEntry, frozen=True):
    """What is shown of a step, by its number."""

    step: int
    x: int
    denoised: int


class Weights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One number for each latent of a stack."""

    numbers: tuple[float, ...]
    dtype: str
    """Torch's name of the type that the numbers have."""


class NoiseSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where noise comes from: `gaussian` is independent in each draw, `brownian` one path over the sigmas from `low` to `high`.

    `seed` is the run's. A path is drawn on the CPU, or on the latent's device.
    """

    kind: Literal["gaussian", "brownian"]
    seed: int
    low: float = 0.0
    high: float = 0.0
    on_cpu: bool = True


class CallInfo(NamedTuple):
    """One model call: its sigma (0-dim fp32 on the CPU), its step, and whether it is the one that opens the step."""

    sigma: Tensor
    step: int
    opens_step: bool


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that a sampler does from the noisy latent to the value `result`. `name` is the user's word for the sampler."""

    name: str
    entries: tuple[Operation | Draw | ModelEvaluation | StepEvent, ...]
    result: int
    weights: tuple[Weights, ...] = ()
    sources: tuple[NoiseSource, ...] = ()

    @property
    def shows_steps(self) -> bool:
        """Whether the sampler says which step it is at; without, each call counts as one."""
        return any(isinstance(entry, StepEvent) for entry in self.entries)

    def calls(self) -> list[CallInfo]:
        """The model calls, all of which are known beforehand.

        The call before step i is told opens it. Where the steps that are told do not rise by one from 0 with a call before
        each, they are counted.
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
    """As bytes, uint8, 1-D: what a request carries beside its tensors."""
    return torch.frombuffer(bytearray(msgspec.msgpack.encode(program)), dtype=torch.uint8)


def view_along(weights: Weights, along: StackWeights, ndim: int) -> Tensor:
    """The vector in the shape in which it stands beside stacks of latents of `ndim` dimensions, on the CPU."""
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
"""By torch's name: how many of the arguments, from the first on, torch wants as tensors."""

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
"""The functions of operations that torch has under no name of its own, or with other arguments."""


def function_of(name: str) -> Callable[..., Tensor]:
    """Return the function that computes an operation."""
    return OTHERS[name] if name in OTHERS else getattr(torch, name)
