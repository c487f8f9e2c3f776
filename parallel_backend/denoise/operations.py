"""The operations that a sampler's program may have: those that treat every element of a latent for itself.

A value is a latent (or one patch of it), or several of them stacked along a dimension of their own. What is computed of
patches is then the patches of what would be computed of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

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
"""What an elementwise operation may be given by name."""

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
"""A cast; a latent of one number; and what makes a stack, or one latent of a stack."""


def function_of(name: str) -> Callable[..., Tensor]:
    """What computes an operation."""
    return OTHERS[name] if name in OTHERS else getattr(torch, name)
