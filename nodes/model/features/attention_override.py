"""Functions of ComfyUI's nodes that replace attention (ModelAttentionBackend), sent to the workers as recipes.

The function must treat each head separately and keep no state from call to call. Each rank has some of the heads, and builds
the function's objects anew for each model call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import comfy.ldm.modules.attention
import msgspec
import torch
from comfy.model_management import get_torch_device
from torch import Tensor

from ....parallel_backend.conditioning import ATTENTION_OVERRIDE, BRANCHES, OPTIONS
from ....parallel_backend.diffusion import FunctionRecipe, Value
from ....parallel_backend.errors import Refused
from ....parallel_backend.models.comfyui.comfy_family import ComfyFamily
from ....parallel_backend.models.comfyui.features.recipe import (
    decoded,
    encoded,
    function_from,
    named,
    object_from,
    objects_from,
    unpacked,
)
from ....parallel_backend.plan import ModelShape, ParallelPlan
from ..own_code import name_of
from ..refusals import refuse_transformer_options
from ..trials import all_equal, random
from .feature import Feature, FeatureCall
from .node_functions import strings_in
from .recipe import RecipeReader, same, state_of

OPTION = "optimized_attention_override"
"""The transformer option that holds the function."""

UNSENT = {BRANCHES, "uuids", "callbacks", "wrappers"}
"""ComfyUI's options that are not sent to workers."""

TOKENS, ROWS = 65, 2
"""Numbers of tokens and rows of a trial's tensors."""

TOLERANCES = {torch.float32: 1e-5}
ROUGH = 1e-2
"""Allowed relative error between computing heads separately and together, for dtypes below fp32."""


def refuse_split(function: Any, requested_plan: ParallelPlan, what: str = "an attention override") -> None:
    """Raise Refused if a plan has a degree that a function with all tokens of some heads cannot run with.

    Args:
        function: the function.
        requested_plan: the plan.
        what: the function's description for the message.
    """
    degrees = {"ring": requested_plan.ring, "pipefusion": requested_plan.pipefusion, "patches": requested_plan.patches}
    if names := [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]:
        raise Refused(
            f"{what} ({name_of(function)}) needs all tokens of its heads on one GPU, which is not possible with "
            f"{' and '.join(names)}: set {' and '.join(name for name, degree in degrees.items() if degree > 1)} to 0 or 1 in "
            "Parallel Plan, or remove the node that adds it."
        )


def _values(call: FeatureCall) -> dict[str, Value]:
    """Return the recipe of the function that replaces attention, as values to send with a call; empty if there is none.

    Raises:
        Refused: workers cannot run the function, or not under the requested plan.
    """
    function = call.options.get(OPTION)
    if function is None:
        return {}
    remote = call.proxy.remote
    recipe = RecipeReader().read(function) if isinstance(remote.family, ComfyFamily) else None
    if recipe is None:
        refuse_transformer_options({OPTION: function}, call.proxy.skeleton)
    assert recipe is not None
    refuse_split(function, remote.requested_plan)
    return {f"{OPTIONS}.{ATTENTION_OVERRIDE}": _tried(encoded([recipe]), remote.shape, call.dtype)}


@functools.lru_cache(maxsize=8)
def _tried(recipes: str, shape: ModelShape, dtype: torch.dtype) -> str:
    """Try the function of an encoded recipe. Return the recipe with the names of the lists that have one entry per head.

    Raises:
        Refused: the function cannot be tried, gives another result for some heads than for all, keeps state, or reads options
            that are not sent to workers.
    """
    (recipe,) = decoded(recipes)
    values = {name: unpacked(value) for name, value in recipe.values.items()}
    lists = tuple(
        name for name, value in values.items() if isinstance(value, list | tuple) and len(value) == shape.heads
    )
    reason = ""
    for by_head in dict.fromkeys((lists, ())):
        candidate = msgspec.structs.replace(recipe, by_head=by_head)
        reason = _reason(candidate, shape, dtype)
        if not reason:
            return encoded([candidate])
    raise Refused(
        f"an attention override ({recipe.module}.{recipe.function}) cannot be applied to a parallel MODEL, because {reason}: "
        "remove that node, or use Load Diffusion Model."
    )


def _reason(recipe: FunctionRecipe, shape: ModelShape, dtype: torch.dtype) -> str:
    """Return the reason why workers cannot run the function of a recipe; empty if they can."""
    objects = objects_from([recipe])
    results = functools.partial(_by_heads, recipe, objects, shape, dtype)
    try:
        equal = all_equal(results, TOLERANCES.get(dtype, ROUGH))
    except Exception as error:  # another pack's code may raise any error
        return f"its trial run failed ({type(error).__name__}: {error})"
    if changed := [*_changed_attributes(recipe, objects)]:
        return f"it keeps state between calls ({', '.join(changed)})"
    if unsent := sorted(UNSENT & {*_strings_of(recipe)}):
        return f"it reads {' and '.join(unsent)}, which the workers do not receive"
    return "" if equal else "its result for a part of the heads differs from its result for all heads together"


def _by_heads(
    recipe: FunctionRecipe, objects: Mapping[str, Any], shape: ModelShape, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the function's results for the heads in two parts, concatenated, and for all heads together.

    Raises:
        ValueError: the function keeps state from call to call.
    """
    heads, device = shape.heads, get_torch_device()
    size = ROWS, heads, TOKENS, shape.head_dim
    q, k, v = (random(seed, size).to(device, dtype) for seed in range(3))
    kernel = inspect.unwrap(comfy.ldm.modules.attention.optimized_attention)

    def answer(run: slice) -> Tensor:
        function = function_from(recipe, objects, run)
        before = state_of(function)
        own = (x[:, run].contiguous() for x in (q, k, v))
        count = len(range(heads)[run])
        out: Tensor = function(
            kernel, *own, count, mask=None, attn_precision=None, skip_reshape=True, skip_output_reshape=True,
            transformer_options={"block_index": 0}, _inside_attn_wrapper=True,
        )  # fmt: skip
        if state_of(function) != before:
            raise ValueError("it keeps state between calls")
        return out

    some = -(-heads // 3)
    parts = [answer(run) for run in (slice(0, some), slice(some, heads)) if range(heads)[run]]
    yield torch.cat(parts, dim=1), answer(slice(0, heads))


def _strings_of(recipe: FunctionRecipe) -> Iterator[str]:
    """Yield the strings in the code of a function, of the functions that it contains and of its objects' classes."""
    yield from strings_in(function_from(recipe))
    methods = [value for entry in recipe.objects.values() for value in vars(named(entry.kind)).values()]
    for method in filter(inspect.isfunction, methods):
        yield from strings_in(method)


def _changed_attributes(recipe: FunctionRecipe, objects: Mapping[str, Any]) -> Iterator[str]:
    """Yield the attributes in which used objects differ from new objects of the same recipes."""
    for name, entry in recipe.objects.items():
        new = vars(object_from(entry))
        for field, value in sorted(vars(objects[name]).items()):
            if field not in new or not same(new[field], value):
                yield f"{type(objects[name]).__name__}.{field}"


FEATURE = Feature(handled=lambda call: (OPTION,), values=_values)
