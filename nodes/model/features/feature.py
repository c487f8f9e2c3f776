"""The interface of a feature that ComfyUI's nodes turn on by transformer options, in ComfyUI's process.

A feature names the options that the workers carry out, the values that are sent to them, and the plans that it refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ....parallel_backend.diffusion import Value
from ....parallel_backend.plan import ResolvedPlan


@dataclass(frozen=True)
class FeatureCall:
    """The facts about a model call, or about a run whose loop is in the workers, that features depend on.

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
        handled: returns the names of the transformer options that this feature carries out in a call. An option that no
            feature carries out is refused.
        values: returns the values that are sent to the workers with a call, by the names that the worker's half reads.
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
    """Return the values of all features that are sent to the workers with a model call, by the names that a worker reads."""
    return {name: value for feature in features for name, value in feature.values(call).items()}


def refuse_plan(features: Sequence[Feature], call: FeatureCall, plan: ResolvedPlan) -> None:
    """Raise Refused for a plan that a feature of a call cannot run with."""
    for feature in features:
        feature.refuse(call, plan)
