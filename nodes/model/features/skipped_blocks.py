"""Blocks that ComfyUI's skip layer guidance leaves out of a model call: the workers leave them out too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....parallel_backend.conditioning import OPTIONS, SKIPPED_BLOCKS, flatten
from ....parallel_backend.diffusion import Value
from ....parallel_backend.errors import Refused
from ....parallel_backend.plan import ResolvedPlan
from .places import BLOCKS, recipes_at

OPTION = "patches_replace"
"""The option in which nodes put what stands in for parts of the model, by kind and place."""

Blocks = list[tuple[str, int]]


def skipped_in(transformer_options: Mapping[str, Any]) -> Blocks:
    """Return the skipped blocks as (kind, number). Return none if anything is replaced by another function."""
    replaced = transformer_options.get(OPTION) or {}
    functions = replaced.get(BLOCKS, {})
    if replaced.keys() - {BLOCKS} or recipes_at(BLOCKS, [*dict.fromkeys(functions.values())]) is None:
        return []
    return list(functions)


def values_of(skipped: Blocks) -> dict[str, Value]:
    """Return the skipped blocks as values that go with a call."""
    values: dict[str, Value] = {}
    if skipped:
        flatten(f"{OPTIONS}.{SKIPPED_BLOCKS}", skipped, {}, values)
    return values


def check_stages(skipped: Blocks, plan: ResolvedPlan) -> None:
    """Raise Refused where a PipeFusion stage might have no block left: it would have nothing to hand on."""
    if plan.pipefusion > 1 and len(skipped) >= min(plan.stages):
        raise Refused(
            f"the guidance leaves out {len(skipped)} of the model's blocks and a PipeFusion stage of the plan has "
            f"{min(plan.stages)}: choose pipefusion 1 in Parallel Plan, or leave out fewer."
        )
