"""Functions of ComfyUI's nodes on a MODEL, by the place where nodes put them. Workers rebuild the functions from recipes.

PLACES is the table of places: how ranks divide the arguments of a function there, and how a trial calls the function. A new
node's function at one of these places runs in the workers if its trial gives equal results.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, MappingProxyType
from typing import Any

import torch
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from torch import Tensor, nn

from ....parallel_backend.conditioning import (
    ATTENTION_GUIDANCE,
    BRANCHES,
    OPTIONS,
    SKIPPED_BLOCKS,
    UNET_FUNCTIONS,
    flatten,
)
from ....parallel_backend.diffusion import FunctionRecipe, Value
from ....parallel_backend.errors import Refused
from ....parallel_backend.models.comfyui.content.replaced_functions import ReplacedFunction
from ....parallel_backend.models.comfyui.features.node_functions import (
    ATTENTION_OUTPUT,
    PICTURE,
    REPLACED,
    UNET_OUTPUT,
)
from ....parallel_backend.models.comfyui.features.recipe import encoded, function_from
from ....parallel_backend.plan import ResolvedPlan
from ..refusals import WAY_OUT
from ..trials import TOLERANCE, Results, random, verdicts
from .feature import Feature, FeatureCall
from .recipe import RecipeReader, closure_of, state_of

GUIDANCE = "sampler_post_cfg_function"
"""The model option with the functions that ComfyUI calls after classifier-free guidance, in the order of the calls."""

BLOCKS = "dit"
"""The key of `patches_replace` under which nodes put functions that replace transformer blocks."""

LATENTS = "denoised", "cond_denoised", "uncond_denoised", "input"
"""The latents that workers pass to a function after the guidance."""

SCALE = "cond_scale"
"""The cfg, which workers also pass."""


@dataclass(frozen=True)
class FunctionPlace:
    """A place where nodes put functions.

    Attributes:
        results: the trial: yields pairs of tensors that must be equal, given the function, the rebuilt function and the
            numbers of channels.
        reads: the keys of its arguments that a function may read. Workers do not have the other arguments.
        tolerance: the allowed relative error of the results.
    """

    results: Callable[[Any, Any, Sequence[int]], Iterator[tuple[Tensor, Tensor]]]
    reads: frozenset[str] = frozenset()
    tolerance: float = TOLERANCE


def recipes_at(place: str, functions: Sequence[Any], channels: Sequence[int] = ()) -> list[FunctionRecipe] | None:
    """Return the recipes of the functions at a place, in order; None if workers cannot run one of them.

    Args:
        place: a key of PLACES.
        functions: the functions.
        channels: the widths of a UNet's blocks, for functions between its blocks.
    """
    recipes: list[FunctionRecipe] = []
    for function in functions:
        recipe = RecipeReader().read(function)
        if recipe is None or _mismatch(place, function, recipe, channels):
            return None
        recipes.append(recipe)
    return recipes


def mismatch_at(place: str, function: Any, channels: Sequence[int] = ()) -> str | None:
    """Return the name of the factory of a function at a place, with the reason why workers cannot run the function.

    Return None if they can run it, and also if they cannot rebuild it at all.
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
        ValueError: the function reads arguments that workers do not have, or keeps state from call to call.
    """
    rebuilt = function_from(recipe)
    if unsent := {text for text in strings_in(function) if text.isidentifier()} - place.reads:
        raise ValueError(f"it reads {' and '.join(sorted(unsent))}, which the workers do not receive")
    before = state_of(function), state_of(rebuilt)
    yield from place.results(function, rebuilt, channels)
    if (state_of(function), state_of(rebuilt)) != before:
        raise ValueError("it keeps state between calls")


def strings_in(function: Any) -> Iterator[str]:
    """Yield the strings in the code of a function, and of the functions in its closure."""
    codes = [function.__code__]
    codes += [value.__code__ for value in closure_of(function).values() if inspect.isfunction(value)]
    while codes:
        constants = codes.pop().co_consts
        yield from (value for value in constants if isinstance(value, str))
        codes += [value for value in constants if isinstance(value, CodeType)]


def _by_rows(
    call: Callable[[Any, Sequence[Tensor]], Sequence[Tensor]], function: Any, rebuilt: Any, tensors: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the results for the rows computed separately and for the whole batch, and those of a second call and the first."""
    whole, again = (call(function, [tensor.clone() for tensor in tensors]) for _ in range(2))
    rows = [call(rebuilt, [tensor[row : row + 1].clone() for tensor in tensors]) for row in (0, 1)]
    yield from zip(map(torch.cat, zip(*rows, strict=True)), whole, strict=True)
    yield from zip(again, whole, strict=True)


def _after_guidance(function: Any, rebuilt: Any, _: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the results of a function after the guidance, with the latents divided by rows."""
    return _by_rows(
        lambda called, latents: [called({**dict(zip(LATENTS, latents, strict=True)), SCALE: 3.0})],
        function,
        rebuilt,
        [random(seed, (2, 4, 6, 5)) for seed in range(len(LATENTS))],
    )


def _after_attention(function: Any, rebuilt: Any, _: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the results of a function after attention, with the tokens in two parts: all of the picture, or text first."""
    out, branches = random(0, (2, 8, 4)), {BRANCHES: [1, 0]}
    for whole, parts in (({}, ({}, {})), ({PICTURE: [3, 8]}, ({PICTURE: [3, 4]}, {PICTURE: [0, 4]}))):
        output, again = (function(out.clone(), {**branches, **whole}) for _ in range(2))
        halves = zip((out[:, :4], out[:, 4:]), parts, strict=True)
        yield torch.cat([rebuilt(half.clone(), {**branches, **part}) for half, part in halves], dim=1), output
        yield again, output


def _after_unet_block(function: Any, rebuilt: Any, channels: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the results of a function after a UNet's block, with the features of each width divided by rows."""
    for width in channels:
        features = [random(seed, (2, width, 4, 4)) for seed in range(2)]
        yield from _by_rows(lambda called, arguments: called(*arguments, {}), function, rebuilt, features)


def _skipped(function: Any, rebuilt: Any, _: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a block's arguments and the function's output, which must be equal: workers return the arguments instead."""
    arguments, absent = {"img": random(0, (1, 4, 4)), "txt": random(1, (1, 3, 4))}, torch.empty(0)
    output = function({name: tensor.clone() for name, tensor in arguments.items()}, {"original_block": None})
    for name in {*arguments, *output}:
        yield arguments.get(name, absent), output.get(name, absent)


PLACES: Mapping[str, FunctionPlace] = MappingProxyType(
    {
        GUIDANCE: FunctionPlace(_after_guidance, frozenset({*LATENTS, SCALE})),
        ATTENTION_OUTPUT: FunctionPlace(_after_attention, frozenset({BRANCHES, PICTURE})),
        UNET_OUTPUT: FunctionPlace(_after_unet_block),
        BLOCKS: FunctionPlace(_skipped, tolerance=0.0),
    }
)


def guidance_functions(model_options: Mapping[str, Any]) -> list[FunctionRecipe] | None:
    """Return the recipes of the functions that change the guidance, in ComfyUI's order; None if any function is unknown."""
    return recipes_at(GUIDANCE, model_options.get(GUIDANCE, ()))


def attention_guidance_functions(transformer_options: Mapping[str, Any]) -> list[FunctionRecipe]:
    """Return the recipes of the attention guidance functions in order; an empty list if any function is unknown."""
    return recipes_at(ATTENTION_OUTPUT, _patches(transformer_options, ATTENTION_OUTPUT)) or []


def unet_functions(transformer_options: Mapping[str, Any], model: nn.Module) -> list[FunctionRecipe]:
    """Return the recipes of the functions between a UNet's output blocks in order; an empty list if any function is unknown.

    Args:
        transformer_options: the options that hold the functions.
        model: ComfyUI's diffusion model.
    """
    if not isinstance(model, UNetModel):
        return []
    return recipes_at(UNET_OUTPUT, _patches(transformer_options, UNET_OUTPUT), channels_of(model)) or []


def channels_of(model: nn.Module) -> list[int]:
    """Return the widths of a UNet's blocks; an empty list for other models."""
    return (
        sorted({model.model_channels * factor for factor in model.channel_mult}) if isinstance(model, UNetModel) else []
    )


def _attention_values(call: FeatureCall) -> dict[str, Value]:
    """Return the attention guidance functions and the branches of the call, as values to send with the call."""
    values: dict[str, Value] = {}
    if recipes := attention_guidance_functions(call.options):
        values[f"{OPTIONS}.{ATTENTION_GUIDANCE}"] = encoded(recipes)
        flatten(f"{OPTIONS}.{BRANCHES}", call.options.get(BRANCHES), {}, values)
    return values


def _unet_values(call: FeatureCall) -> dict[str, Value]:
    """Return the functions between a UNet's output blocks, as values to send with a call."""
    recipes = unet_functions(call.options, call.proxy.skeleton)
    return {f"{OPTIONS}.{UNET_FUNCTIONS}": encoded(recipes)} if recipes else {}


def refuse_differing(transformer_options: Mapping[str, Any], model: nn.Module) -> None:
    """Raise Refused for a function inside the model that workers could rebuild, but that does not give the same result there.

    Functions at other places are refused by the names of their places (`networks_of`).
    """
    widths = channels_of(model)
    places = {ATTENTION_OUTPUT, UNET_OUTPUT} if widths else {ATTENTION_OUTPUT}
    patches = {place: functions for place, functions in (transformer_options.get("patches") or {}).items() if functions}
    for place in patches if patches.keys() <= places else ():
        for function in patches[place]:
            if (what := mismatch_at(place, function, widths)) is not None:
                raise Refused(f"a node's function ({what}) cannot be applied to a parallel MODEL: {WAY_OUT}.")


def _patches(transformer_options: Mapping[str, Any], place: str) -> Sequence[Any]:
    return (transformer_options.get("patches") or {}).get(place, ())


def skipped_in(transformer_options: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the skipped blocks as (kind, number); an empty list if another function replaces anything."""
    replaced = transformer_options.get(REPLACED) or {}
    functions = replaced.get(BLOCKS, {})
    if replaced.keys() - {BLOCKS} or recipes_at(BLOCKS, [*functions.values()]) is None:
        return []
    return list(functions)


def _skipped_values(call: FeatureCall) -> dict[str, Value]:
    """Return the skipped blocks, as values to send with a call."""
    values: dict[str, Value] = {}
    if skipped := skipped_in(call.options):
        flatten(f"{OPTIONS}.{SKIPPED_BLOCKS}", [*skipped], {}, values)
    return values


def _refuse_empty_stages(call: FeatureCall, plan: ResolvedPlan) -> None:
    """Raise Refused if a PipeFusion stage might have no block left, and so no output to send to the next stage."""
    if plan.pipefusion > 1 and len(skipped := skipped_in(call.options)) >= min(plan.stages):
        raise Refused(
            f"the guidance skips {len(skipped)} of the model's blocks and a PipeFusion stage of the plan has only "
            f"{min(plan.stages)}: choose pipefusion 1 in Parallel Plan, or skip fewer blocks."
        )


GUIDANCE_FEATURE = Feature(values=_attention_values)
UNET_FEATURE = Feature(values=_unet_values)
SKIPPED_FEATURE = Feature(
    handled=lambda call: {REPLACED} if skipped_in(call.options) else (),
    values=_skipped_values,
    refuse=_refuse_empty_stages,
)
