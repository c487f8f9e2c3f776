"""Calls of a small model with two batch items, and the same calls with one item each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..small.case import Case

TEXT = "context"


@dataclass(frozen=True)
class Pair:
    """A call with two batch items, and a call with each item alone."""

    together: Case
    apart: tuple[Case, Case]


def rows_of_a_batch(case: Case) -> Pair:
    """Return a pair of two latents under one prompt."""
    first = _first(case)
    return _pair(first, replace(first, x=-0.5 * first.x.flip(-1)))


def two_prompts(case: Case) -> Pair:
    """Return a pair of one latent under two prompts."""
    first = _first(case)
    second_text = -0.5 * first.arguments[TEXT].flip(-1)
    return _pair(first, replace(first, arguments={**first.arguments, TEXT: second_text}))


def _first(case: Case) -> Case:
    """Return the call with only the first item of the batch."""
    batch = case.x.shape[0]

    def first_item(value: Any) -> Any:
        return value[:1] if isinstance(value, Tensor) and value.shape[:1] == (batch,) else value

    arguments = {name: _each(first_item, value) for name, value in case.arguments.items()}
    shapes = tuple((1, *shape[1:]) for shape in case.shapes)
    return replace(case, x=case.x[:1], timestep=_each(first_item, case.timestep), arguments=arguments, shapes=shapes)


def _pair(first: Case, second: Case) -> Pair:
    def two(first_value: Any, second_value: Any) -> Any:
        if isinstance(first_value, Tensor):
            return torch.cat([first_value, second_value]) if first_value.shape[:1] == (1,) else first_value
        if isinstance(first_value, list | tuple):
            return type(first_value)(two(*each) for each in zip(first_value, second_value, strict=True))
        return first_value

    arguments = {name: two(value, second.arguments[name]) for name, value in first.arguments.items()}
    shapes = tuple((2, *shape[1:]) for shape in first.shapes)
    time = two(first.timestep, second.timestep)
    together = replace(first, x=two(first.x, second.x), timestep=time, arguments=arguments, shapes=shapes)
    return Pair(together, (first, second))


def _each(function: Any, value: Any) -> Any:
    """Apply a function to each tensor in a value, its lists and tuples. Dicts stay: ComfyUI shares them between items."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return type(value)(_each(function, each) for each in value)  # type: ignore[call-arg]
    return function(value)
