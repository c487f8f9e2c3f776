"""The places among a MODEL's options where ComfyUI's nodes put functions that workers rebuild from recipes.

Each place has a trial: the rebuilt function on the parts that ranks have, and the function itself on the whole. A new node's
function at one of these places runs in the workers if its trial finds it equal.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ....parallel_backend.conditioning import SIDES
from ....parallel_backend.diffusion import FunctionRecipe
from ....parallel_backend.models.comfyui.content.replaced_functions import ReplacedFunction
from ....parallel_backend.models.comfyui.features.node_functions import ATTENTION_OUTPUT, PICTURE, UNET_OUTPUT
from ....parallel_backend.models.comfyui.features.recipe import encoded, function_from
from ..trials import TOLERANCE, Results, random, verdicts
from .recipe import RecipeReader, closure_of, state_of

GUIDANCE = "sampler_post_cfg_function"
"""The model option with the functions after classifier-free guidance, the first one first."""

BLOCKS = "dit"
"""Where nodes put functions that replace blocks, among `patches_replace`."""

LATENTS = "denoised", "cond_denoised", "uncond_denoised", "input"
"""The latents that workers pass to a function after the guidance."""

SCALE = "cond_scale"
"""The cfg, which workers pass too."""


@dataclass(frozen=True)
class FunctionPlace:
    """A place where nodes put functions.

    Attributes:
        results: the trial of the function, and of the function that is rebuilt, with these numbers of channels.
        reads: the keys of its arguments that a function may read: workers do not have the others.
        tolerance: the allowed relative error of the results.
    """

    results: Callable[[Any, Any, Sequence[int]], Iterator[tuple[Tensor, Tensor]]]
    reads: frozenset[str] = frozenset()
    tolerance: float = TOLERANCE


def recipes_at(place: str, functions: Sequence[Any], channels: Sequence[int] = ()) -> list[FunctionRecipe] | None:
    """Return the recipes of the functions at a place, in order; None if workers cannot run one of them."""
    recipes: list[FunctionRecipe] = []
    for function in functions:
        recipe = RecipeReader().read(function)
        if recipe is None or _mismatch(place, function, recipe, channels):
            return None
        recipes.append(recipe)
    return recipes


def mismatch_at(place: str, function: Any, channels: Sequence[int] = ()) -> str | None:
    """Return the name of what has made a function at a place, with the reason why workers cannot run the function.

    Return None if they can run it, and if workers cannot rebuild it at all.
    """
    recipe = RecipeReader().read(function)
    return None if recipe is None else _mismatch(place, function, recipe, channels)


def _mismatch(place: str, function: Any, recipe: FunctionRecipe, channels: Sequence[int]) -> str | None:
    maker = ReplacedFunction(recipe.module, recipe.function.partition(".<locals>")[0], "closure")
    results = functools.partial(_results, PLACES[place], function, recipe, channels)
    use = f"{place} {[*channels]} {encoded([recipe])}"
    return verdicts().mismatch_of(maker, use, results, PLACES[place].tolerance)


def _results(place: FunctionPlace, function: Any, recipe: FunctionRecipe, channels: Sequence[int]) -> Results:
    """Yield the results of a place's trial.

    Raises:
        ValueError: the function reads what workers do not have, or keeps something from call to call.
    """
    rebuilt = function_from(recipe)
    if unsent := {text for text in strings_in(function) if text.isidentifier()} - place.reads:
        raise ValueError(f"it reads {' and '.join(sorted(unsent))}, which the workers are not told")
    before = state_of(function), state_of(rebuilt)
    yield from place.results(function, rebuilt, channels)
    if (state_of(function), state_of(rebuilt)) != before:
        raise ValueError("it keeps something from call to call")


def strings_in(function: Any) -> Iterator[str]:
    """Yield the strings in the code of a function, and of the functions that its closure holds."""
    codes = [function.__code__]
    codes += [value.__code__ for value in closure_of(function).values() if inspect.isfunction(value)]
    while codes:
        constants = codes.pop().co_consts
        yield from (value for value in constants if isinstance(value, str))
        codes += [value for value in constants if isinstance(value, CodeType)]


def _by_rows(
    call: Callable[[Any, Sequence[Tensor]], Sequence[Tensor]], function: Any, rebuilt: Any, tensors: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the results for each row of a batch separately and for the whole batch, and those of a second call."""
    whole, again = (call(function, [tensor.clone() for tensor in tensors]) for _ in range(2))
    rows = [call(rebuilt, [tensor[row : row + 1].clone() for tensor in tensors]) for row in (0, 1)]
    yield from zip(map(torch.cat, zip(*rows, strict=True)), whole, strict=True)
    yield from zip(again, whole, strict=True)


def _after_guidance(function: Any, rebuilt: Any, _: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Divide the latents by rows."""
    return _by_rows(
        lambda called, latents: [called({**dict(zip(LATENTS, latents, strict=True)), SCALE: 3.0})],
        function,
        rebuilt,
        [random(seed, (2, 4, 6, 5)) for seed in range(len(LATENTS))],
    )


def _after_attention(function: Any, rebuilt: Any, _: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Divide the tokens, with text before the picture and as one stream."""
    out, branches = random(0, (2, 8, 4)), {SIDES: [1, 0]}
    for whole, parts in (({}, ({}, {})), ({PICTURE: [3, 8]}, ({PICTURE: [3, 4]}, {PICTURE: [0, 4]}))):
        output, again = (function(out.clone(), {**branches, **whole}) for _ in range(2))
        halves = zip((out[:, :4], out[:, 4:]), parts, strict=True)
        yield torch.cat([rebuilt(half.clone(), {**branches, **part}) for half, part in halves], dim=1), output
        yield again, output


def _after_unet_block(function: Any, rebuilt: Any, channels: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Divide the features of each width by rows."""
    for width in channels:
        features = [random(seed, (2, width, 4, 4)) for seed in range(2)]
        yield from _by_rows(lambda called, given: called(*given, {}), function, rebuilt, features)


def _skipped(function: Any, rebuilt: Any, _: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Divide nothing: the workers return a block's arguments in the function's place."""
    arguments, absent = {"img": random(0, (1, 4, 4)), "txt": random(1, (1, 3, 4))}, torch.empty(0)
    output = function({name: tensor.clone() for name, tensor in arguments.items()}, {"original_block": None})
    for name in {*arguments, *output}:
        yield arguments.get(name, absent), output.get(name, absent)


PLACES: Mapping[str, FunctionPlace] = MappingProxyType(
    {
        GUIDANCE: FunctionPlace(_after_guidance, frozenset({*LATENTS, SCALE})),
        ATTENTION_OUTPUT: FunctionPlace(_after_attention, frozenset({SIDES, PICTURE})),
        UNET_OUTPUT: FunctionPlace(_after_unet_block),
        BLOCKS: FunctionPlace(_skipped, tolerance=0.0),
    }
)
