"""Reduced models: fewer blocks in their lists, and random weights under which every part of a model changes the output."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...declaration import Declaration

DRAWN = 100_003
"""Largest number of random numbers drawn for one tensor. It is prime, so the rows of a larger tensor differ."""

DEPTHS = ("depth", "layer", "block")
"""Parts of the names of attributes that hold the length of a list of blocks."""

DEVIATION = 0.03
"""Standard deviation of the random numbers of vectors, such as biases."""

SCALE, BIAS = 0, -1

Kind = tuple[torch.dtype, int]
"""A parameter's dtype, and a number: for a matrix the power of two nearest to its inputs, for a vector SCALE or BIAS."""


def draw(*shape: int, seed: int) -> Tensor:
    """Draw standard normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def repeated(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Draw standard normal numbers, of which at most DRAWN differ: drawing is slow, and repeating is not."""
    count = math.prod(shape)
    return torch.randn(min(count, DRAWN), generator=generator).repeat(-(-count // DRAWN))[:count].view(tuple(shape))


def randomise(module: Any, seed: int, filed: Container[str] = ()) -> Any:
    """Fill all parameters of a torch module so that activations stay near 1 and every part matters, and return the module.

    Args:
        module: of any type, because diffusers' annotations hide that its models are modules.
        filed: the names of tensors in the model's file: buffers among them are filled too.
    """
    generator = torch.Generator().manual_seed(seed)
    buffers = ((name, buffer) for name, buffer in module.named_buffers() if name in filed)
    with torch.no_grad():
        for name, tensor in itertools.chain(module.named_parameters(), buffers):
            if not tensor.is_floating_point():
                continue
            drawn = repeated(tensor.shape, generator)
            if tensor.ndim <= 1:
                is_scale = "norm" in name and name.endswith("weight")
                drawn = 1 + 0.2 * drawn if is_scale else 0.1 * drawn
            elif tensor.numel():
                gain = 0.5 if "norm" in name or "adaln" in name else 1.0
                drawn = gain * drawn / math.sqrt(tensor[0].numel())
            tensor.copy_(drawn)
    return module.eval().requires_grad_(False)


def randomise_shared(module: nn.Module, device: torch.device) -> None:
    """Move a module from the meta device to another, with random parameters that are views of one buffer for each kind.

    This takes next to no memory. Matrices keep the size of activations, scales are near 1 and biases near 0.
    """
    largest: dict[Kind, int] = {}
    for name, parameter in module.named_parameters():
        kind = _kind(name, parameter)
        largest[kind] = max(parameter.numel(), largest.get(kind, 0))
    drawn = {kind: _numbers(*kind, count, device) for kind, count in largest.items()}
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            view = drawn[_kind(name, parameter)][: parameter.numel()].view(parameter.shape)
            part.register_parameter(name, nn.Parameter(view, requires_grad=False))
        for name, buffer in list(part.named_buffers(recurse=False)):
            part._buffers[name] = torch.zeros_like(buffer, device=device) if buffer.is_meta else buffer.to(device)


def _kind(name: str, parameter: Tensor) -> Kind:
    if parameter.ndim < 2 or not parameter.numel():
        return parameter.dtype, BIAS if name.endswith("bias") else SCALE
    return parameter.dtype, 1 << round(math.log2(parameter.numel() // parameter.shape[0]))


def _numbers(dtype: torch.dtype, features: int, count: int, device: torch.device) -> Tensor:
    if not dtype.is_floating_point:
        return torch.zeros(count, dtype=dtype, device=device)
    drawn = torch.randn(count, generator=torch.Generator(device).manual_seed(0), device=device)
    if features in (SCALE, BIAS):
        return ((features == SCALE) + DEVIATION * drawn).to(dtype)
    return (drawn / features**0.5).to(dtype)


def keep_two_of_each(module: nn.Module, declaration: Declaration) -> None:
    """Drop all blocks but the first two of each group, or those of the first two units if blocks run in units.

    A group of one block gets a copy of it; an empty group stays empty. Groups between the first and the last lose all blocks,
    because their blocks count as blocks of the last group.
    """
    units = declaration.units(module)[:2] if declaration.units else None
    for group in declaration.groups:
        if not isinstance(module.get_submodule(group.path), nn.ModuleList):  # a single block
            continue
        blocks = list(module.get_submodule(group.path).children())
        if units is None and group in declaration.groups[1:-1]:
            members = []
        elif units is None:
            members = [*blocks, *copy.deepcopy(blocks[-1:])][:2]
        else:
            members = blocks[: sum(path.startswith(f"{group.path}.") for unit in units for path in unit)]
        module.set_submodule(group.path, nn.ModuleList(members))


def set_members(model: nn.Module, path: str, members: Sequence[nn.Module]) -> None:
    """Replace the members of a list, and update the attributes of its owner that hold the list's length."""
    owner, length = model.get_submodule(path.rpartition(".")[0]), len(_list_of(model, path))
    for name, value in list(vars(owner).items()):
        if type(value) is int and value == length and any(mark in name for mark in DEPTHS):
            setattr(owner, name, len(members))
    model.set_submodule(path, nn.ModuleList(members))


def keep_some(model: nn.Module, first: int, per_other_kind: int) -> dict[str, int]:
    """Drop the members of each list of blocks but the first ones of each kind (a class and the shapes of its weights).

    Args:
        first: the number of members to keep of the list's first kind.
        per_other_kind: the number of members to keep of each other kind.

    Returns:
        The lengths that the lists had, by path.
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
    """Return the lists that are in no other list and whose members have at least two linear layers, with their paths.

    Other lists must keep their length, because the code around them counts the members. An example is a norm for each layer of
    a text encoder.
    """
    lists = {path: module for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    return [
        (path, module)
        for path, module in lists.items()
        if not any(path.startswith(f"{other_path}.") for other_path in lists)
        and all(sum(isinstance(part, nn.Linear) for part in member.modules()) > 1 for member in module)
    ]


def lengthen(model: nn.Module, path: str, length: int) -> None:
    """Add copies of a list's last member, which share its weights, until the list has `length` members."""
    members = [*_list_of(model, path)]
    weights = {id(tensor): tensor for tensor in (*members[-1].parameters(), *members[-1].buffers())}
    more = [copy.deepcopy(members[-1], {**weights}) for _ in range(length - len(members))]
    if more:
        set_members(model, path, [*members, *more])


def _list_of(model: nn.Module, path: str) -> nn.ModuleList:
    submodule = model.get_submodule(path)
    assert isinstance(submodule, nn.ModuleList)
    return submodule
