"""Features of ComfyUI's nodes in ComfyUI's process: which transformer options the workers carry out, and what is sent of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ....parallel_backend.diffusion import Value
from ....parallel_backend.plan import ResolvedPlan


@dataclass(frozen=True)
class FeatureCall:
    """A model call, or the calls of a run in the workers' loop, as features see it.

    Attributes:
        options: ComfyUI's transformer_options.
        proxy: the DiffusionProxy of the model.
        dtype: the compute dtype.
    """

    options: Mapping[str, Any]
    proxy: Any
    dtype: torch.dtype


@dataclass(frozen=True)
class Feature:
    """A feature that ComfyUI's nodes turn on by transformer options.

    Attributes:
        handled: returns the names of the options that workers carry out in a call. All others are refused by name.
        values: returns what goes with a call, under the name by which the worker's half of the feature knows it.
        refuse: raises Refused for a plan that the feature cannot run with.
    """

    handled: Callable[[FeatureCall], Collection[str]] = lambda call: ()
    values: Callable[[FeatureCall], Mapping[str, Value]] = lambda call: {}
    refuse: Callable[[FeatureCall, ResolvedPlan], None] = lambda call, plan: None


def unhandled(features: Sequence[Feature], call: FeatureCall) -> dict[str, Any]:
    """Return the transformer options of a call that no feature carries out."""
    handled = {name for feature in features for name in feature.handled(call)}
    return {name: value for name, value in call.options.items() if name not in handled}


def values_of(features: Sequence[Feature], call: FeatureCall) -> dict[str, Value]:
    """Return what goes with a call."""
    return {name: value for feature in features for name, value in feature.values(call).items()}


def refuse_plan(features: Sequence[Feature], call: FeatureCall, plan: ResolvedPlan) -> None:
    """Raise Refused for a plan that a feature of a call cannot run with."""
    for feature in features:
        feature.refuse(call, plan)
