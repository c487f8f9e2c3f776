"""A function that a node of ComfyUI's puts in attention's place, in a worker."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from ....conditioning import ATTENTION_OVERRIDE, OPTIONS
from ....diffusion import Value
from ...sequence_parallel.function_override import Function, OfHeads
from .recipe import decoded, function_from, objects_from


def override_in(values: Mapping[str, Value]) -> OfHeads | None:
    """Return the function that goes with a call's values; None if there is none."""
    text = values.get(f"{OPTIONS}.{ATTENTION_OVERRIDE}")
    if text is None:
        return None
    (recipe,) = decoded(str(text))
    objects = objects_from([recipe])

    @functools.lru_cache(maxsize=8)
    def cached_function(start: int | None, stop: int | None, heads: int) -> Function:
        return function_from(recipe, objects, slice(start, stop))  # type: ignore[no-any-return]

    return lambda run, heads: cached_function(run.start, run.stop, heads)
