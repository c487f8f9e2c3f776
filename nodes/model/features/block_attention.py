"""Functions of ComfyUI's nodes that replace a model's blocks to inject attention (BlockSparseAttention on MiniMax-H3).

Workers rebuild the functions from recipes, and check that each injects attention and does nothing else
(`parallel_backend/models/comfyui/features/block_attention.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from ....parallel_backend.conditioning import BLOCK_ATTENTION, OPTIONS
from ....parallel_backend.declaration import Declaration, InjectedAttention
from ....parallel_backend.diffusion import FunctionRecipe, Value
from ....parallel_backend.errors import Refused
from ....parallel_backend.models.comfyui.features.block_attention import (
    BLOCK,
    TOKENS,
    BlockRecipe,
    injecting_attention,
    replacements_from,
)
from ....parallel_backend.models.comfyui.features.node_functions import REPLACED
from .attention_override import OPTION as OVERRIDE
from .attention_override import refuse_split
from .feature import Feature, FeatureCall
from .node_functions import BLOCKS
from .recipe import RecipeReader


def takes_attention(declaration: Declaration) -> bool:
    """Return True if the blocks of a model take injected attention."""
    return any(
        isinstance(argument, InjectedAttention) for group in declaration.groups for argument in group.arguments.values()
    )


def recipes_of(transformer_options: Mapping[str, Any], model: nn.Module) -> list[BlockRecipe]:
    """Return the recipes of the functions that replace blocks; none unless one function of ComfyUI's made all of them.

    Each function must hold one block of the model, and all must hold the same other objects.
    """
    replaced = transformer_options.get(REPLACED) or {}
    if replaced.keys() - {BLOCKS}:
        return []
    paths = {id(module): path for path, module in model.named_modules()}
    reader = RecipeReader(paths, transformer_options.get(OVERRIDE))
    recipes: list[BlockRecipe] = []
    for (kind, number), function in replaced.get(BLOCKS, {}).items():
        recipe = reader.read(function)
        if recipe is None or len(set(blocks_in(recipe))) != 1:
            return []
        recipes.append((kind, number, recipe))
    return recipes if len({(recipe.module, recipe.function) for _, _, recipe in recipes}) == 1 else []


def blocks_in(recipe: FunctionRecipe) -> list[str]:
    """Return the paths of the blocks that a function holds, or that functions in its closure hold."""
    return [*recipe.blocks.values(), *(path for inner in recipe.inner.values() for path in blocks_in(inner))]


def refuse_other(recipes: Sequence[BlockRecipe], model: nn.Module) -> None:
    """Raise Refused if a function that replaces a block does more than inject attention.

    The trial has only the number of tokens. The workers check the injected attention itself.
    """
    tokens = torch.empty(1 << 20, 1 << 10, dtype=torch.bfloat16, device="meta")
    for key, function in replacements_from(recipes, model.get_submodule).items():
        options = {"sigmas": torch.tensor([0.5]), "block_index": key[1]}
        try:
            injecting_attention(function)({TOKENS: tokens, "transformer_options": options}, {BLOCK: dict})
        except Refused:
            raise
        except Exception:  # the trial lacks most options of a real call
            continue


def function_in(transformer_options: Mapping[str, Any]) -> Any:
    """Return the first of the functions that replace blocks."""
    return next(iter(transformer_options[REPLACED][BLOCKS].values()))


def _values(call: FeatureCall) -> dict[str, Value]:
    """Return the functions that inject attention into blocks, as values to send with a call; empty if they are unknown.

    Raises:
        Refused: workers cannot run the functions, or not under the requested plan.
    """
    if REPLACED not in call.options:
        return {}
    remote, model = call.proxy.remote, call.proxy.skeleton
    declaration = getattr(remote.config, "declaration", None)
    recipes = recipes_of(call.options, model) if declaration is not None and takes_attention(declaration) else []
    if not recipes:
        return {}
    refuse_split(function_in(call.options), remote.requested_plan, "a node's attention function")
    refuse_other(recipes, model)
    return {f"{OPTIONS}.{BLOCK_ATTENTION}": msgspec.json.encode(recipes).decode()}


FEATURE = Feature(handled=lambda call: {REPLACED} if _values(call) else (), values=_values)
