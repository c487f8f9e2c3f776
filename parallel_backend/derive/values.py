"""Arguments of blocks: lists, tuples, dicts and dataclasses that contain tensors."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (bool, int, float, str, torch.dtype, torch.device)
UNNAMED = "input"
"""The name of each argument of a forward that takes `*args`, such as a linear layer's, followed by the argument's number."""


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of the value with each tensor in it replaced by `change(tensor)`."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(item, change) for item in value)
    if isinstance(value, Mapping):
        return {key: mapped(item, change) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        mapped_copy = copy.copy(value)
        for item in fields(value):
            object.__setattr__(mapped_copy, item.name, mapped(getattr(value, item.name), change))
        return mapped_copy
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a value, in the order in which `mapped` visits them."""
    tensors: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    mapped(value, note)
    return tensors


def unreadable(value: Any) -> str:
    """Return the class name of the first object in the value that these functions cannot look into; empty if there is none."""
    if value is None or isinstance(value, (Tensor, *PLAIN)):
        return ""
    if isinstance(value, (list, tuple)):
        return next(filter(None, map(unreadable, value)), "")
    if isinstance(value, Mapping):
        return next(filter(None, map(unreadable, value.values())), "")
    if is_dataclass(value) and not isinstance(value, type):
        return next(filter(None, (unreadable(getattr(value, each.name)) for each in fields(value))), "")
    return type(value).__name__


def by_name(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a forward by name."""
    signature = inspect.signature(module.forward)
    values: dict[str, Any] = dict(signature.bind(*args, **kwargs).arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            values |= values.pop(parameter.name, {})
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            values |= {f"{UNNAMED}{number}": item for number, item in enumerate(values.pop(parameter.name, ()))}
    return values


def called(module: nn.Module, values: Mapping[str, Any]) -> Any:
    """Return the output of a forward for arguments by name."""
    kinds = {parameter.kind for parameter in inspect.signature(module.forward).parameters.values()}
    unnamed = inspect.Parameter.VAR_POSITIONAL in kinds
    args = [value for name, value in values.items() if unnamed and name.startswith(UNNAMED)]
    return module.forward(
        *args, **{name: value for name, value in values.items() if not unnamed or not name.startswith(UNNAMED)}
    )
