"""Lists of a model's blocks, made shorter and longer."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

DEPTHS = ("depth", "layer", "block")
"""In the names of what says how long a list is."""


def set_members(model: nn.Module, path: str, members: Sequence[nn.Module]) -> None:
    """Have a list of these members. What the list's owner calls its depth goes with it."""
    owner, length = model.get_submodule(path.rpartition(".")[0]), len(_list_of(model, path))
    for name, value in list(vars(owner).items()):
        if type(value) is int and value == length and any(mark in name for mark in DEPTHS):
            setattr(owner, name, len(members))
    model.set_submodule(path, nn.ModuleList(members))


def keep_some(model: nn.Module, first: int, per_other_kind: int) -> dict[str, int]:
    """Drop the members of each list of blocks but the first ones of each kind; kinds are told by the shapes of their weights.

    Returns how many members these lists had, by their paths.
    """
    lengths: dict[str, int] = {}
    for path, module in _lists_of_blocks(model):
        if len(module) <= first:
            continue
        seen: dict[Any, int] = {}
        members = []
        for member in module:
            kind = type(member), tuple((name, tensor.shape) for name, tensor in member.state_dict().items())
            seen[kind] = seen.get(kind, 0) + 1
            if seen[kind] <= (first if kind == next(iter(seen)) else per_other_kind):
                members.append(member)
        lengths[path] = len(module)
        set_members(model, path, members)
    return lengths


def _lists_of_blocks(model: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """Those of members with two linear layers or more, and within no other list: others are counted by the code around them,
    such as a norm for each layer that a text comes from, or the parts of a block."""
    lists = {path: module for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    return [
        (path, module)
        for path, module in lists.items()
        if not any(path.startswith(f"{other_path}.") for other_path in lists)
        and all(sum(isinstance(part, nn.Linear) for part in member.modules()) > 1 for member in module)
    ]


def lengthen(model: nn.Module, path: str, length: int) -> None:
    """Have a list of at least so many members: others like the last one, which share its weights."""
    members = [*_list_of(model, path)]
    weights = {id(tensor): tensor for tensor in (*members[-1].parameters(), *members[-1].buffers())}
    more = [copy.deepcopy(members[-1], {**weights}) for _ in range(length - len(members))]
    if more:
        set_members(model, path, [*members, *more])


def _list_of(model: nn.Module, path: str) -> nn.ModuleList:
    submodule = model.get_submodule(path)
    assert isinstance(submodule, nn.ModuleList)
    return submodule
