"""Attention that ComfyUI's own nodes hand to a model's blocks by standing in for them (BlockSparseAttention on MiniMax-H3).

What stands in for each block is made by one function of ComfyUI's, which is given the block, and which workers call again. What
it may do there, they hold it to (`parallel_backend/models/comfyui/features/block_attention.py`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ....parallel_backend.conditioning import BLOCK_ATTENTION, OPTIONS, flatten
from ....parallel_backend.declaration import Declaration, InjectedAttention
from ....parallel_backend.diffusion import Value
from ....parallel_backend.errors import Refused
from ....parallel_backend.models.comfyui.features.attention_override import ObjectRecipe
from ....parallel_backend.models.comfyui.features.block_attention import (
    BLOCK,
    TOKENS,
    BlockAttentionRecipe,
    handing_attention,
)
from ..conditioning import is_plain
from .attention_override import OPTION as OVERRIDE
from .attention_override import filled, is_importable, object_recipe, place_of
from .skipped_blocks import OPTION


def takes_attention(declaration: Declaration) -> bool:
    """Return True if the blocks of a model take injected attention."""
    return any(
        isinstance(argument, InjectedAttention) for group in declaration.groups for argument in group.arguments.values()
    )


def recipe_of(transformer_options: Mapping[str, Any], model: nn.Module) -> BlockAttentionRecipe | None:
    """Return the recipe by which the workers rebuild the blocks' replacements; None unless one ComfyUI function made all
    of them.

    That must be given the model's own block, and else nothing but plain values and objects of ComfyUI's classes that are as
    they were made, the same ones for each block.
    """
    replaced = transformer_options.get(OPTION) or {}
    functions = replaced.get("dit", {})
    if not functions or replaced.keys() - {"dit"}:
        return None
    paths = {id(module): path for path, module in model.named_modules()}
    overriding = transformer_options.get(OVERRIDE)
    entries = [_entry_of(key, function, paths, overriding) for key, function in functions.items()]
    first = entries[0]
    if first is None or not all(entry is not None and entry[:-1] == first[:-1] for entry in entries):
        return None
    maker, block, objects, _, _ = first
    return BlockAttentionRecipe(maker, block, objects, [entry[-1] for entry in entries if entry is not None])


def refuse_other(recipe: BlockAttentionRecipe, model: nn.Module) -> None:
    """Raise Refused where what stands in for blocks is seen to do more than to hand them attention.

    It is tried with the numbers of tokens alone: what it hands over, workers hold to its own rules.
    """
    tokens = torch.empty(1 << 20, 1 << 10, dtype=torch.bfloat16, device="meta")
    for key, function in recipe.make(model.get_submodule).items():
        options = {"sigmas": torch.tensor([0.5]), "block_index": key[1]}
        try:
            handing_attention(function)({TOKENS: tokens, "transformer_options": options}, {BLOCK: dict})
        except Refused:
            raise
        except Exception:  # whatever it comes to without all that it is told in a model
            continue


def function_in(transformer_options: Mapping[str, Any]) -> Any:
    """One of the functions that stand in for blocks, where there is a recipe of them."""
    return next(iter(transformer_options[OPTION]["dit"].values()))


def values_of(recipe: BlockAttentionRecipe) -> dict[str, Value]:
    """Return a recipe as values that go with a call."""
    prefix, values = f"{OPTIONS}.{BLOCK_ATTENTION}", dict[str, Value]()
    flatten(prefix, {"maker": recipe.maker, "block": recipe.block}, {}, values)
    flatten(f"{prefix}.blocks", [[part for part in block if part != {}] for block in recipe.blocks], {}, values)
    for name, recipe_of_object in recipe.objects.items():
        flatten(f"{prefix}.objects.{name}", filled(recipe_of_object), {}, values)
    return values


Made = tuple[str, str, dict[str, ObjectRecipe], list[int], tuple[str, str, int, dict[str, Any]]]


def _entry_of(key: tuple[str, int], function: Any, paths: Mapping[int, str], overriding: Any) -> Made | None:
    """Return the maker, the name of its block argument, its objects and their ids, and the block's entry in the recipe.

    Return None if the workers cannot rebuild the replacement.
    """
    maker = _maker_of(function)
    if maker is None:
        return None
    arguments = _arguments_of(function, maker)
    if arguments is None or arguments.keys() != inspect.signature(maker).parameters.keys():
        return None
    blocks = [name for name, value in arguments.items() if id(value) in paths]
    values = {name: value for name, value in arguments.items() if is_plain(value)}
    objects = {
        name: recipe
        for name, value in arguments.items()
        if name not in {*blocks, *values} and (recipe := object_recipe(value, overriding or function)) is not None
    }
    if len(blocks) != 1 or len(values) + len(objects) + 1 < len(arguments):
        return None
    (block,) = blocks
    where = place_of(maker)
    assert where is not None
    which = [id(arguments[name]) for name in objects]
    return where, block, objects, which, (paths[id(arguments[block])], *key, values)


def _arguments_of(function: Any, maker: Any) -> dict[str, Any] | None:
    """Return the arguments of the maker, read from the closure of a function that it made.

    Other functions that the same call made may hold some of the arguments. Return None if the closure holds anything
    else.
    """
    arguments: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        value = cell.cell_contents
        if name in inspect.signature(maker).parameters:
            arguments[name] = value
        elif getattr(value, "__code__", None) in maker.__code__.co_consts and value is not function:
            inner = _arguments_of(value, maker)
            if inner is None:
                return None
            arguments |= inner
        else:
            return None
    return arguments


def _maker_of(function: Any) -> Any:
    """Return the ComfyUI function that defines another function inside it; None unless workers can call it."""
    if not is_importable(function) or function.__defaults__ or function.__kwdefaults__:
        return None
    names = function.__qualname__.split(".")
    if len(names) != 3 or names[1] != "<locals>":
        return None
    maker = vars(sys.modules[function.__module__]).get(names[0])
    is_nested = function.__code__ in getattr(getattr(maker, "__code__", None), "co_consts", ())
    return maker if is_nested and place_of(maker) is not None else None
