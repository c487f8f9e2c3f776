"""The interface of a feature of ComfyUI's nodes, in a worker.

A feature turns a value that the host has sent into transformer options that ComfyUI's model reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ...inputs import Inputs
from ...sequence_parallel.forward import RankForward

T = TypeVar("T")

PATCHES = "patches"
"""The transformer option that holds functions for ComfyUI's model to call, in a list for each place of its forward."""


@dataclass(frozen=True)
class RankFeatureCall:
    """The facts about a model call on a rank that features depend on.

    Attributes:
        inputs: the call's inputs.
        device: the rank's device.
        run_state: the objects that features keep from call to call of a run, by their classes.
        forward: the running forward on this rank's tokens; None for an unsharded model.
        block_at: returns the block at a path, with all tokens of some heads.
    """

    inputs: Inputs
    device: torch.device
    run_state: MutableMapping[type, Any] = field(default_factory=dict)
    forward: RankForward | None = None
    block_at: Callable[[str], Any] | None = None

    def of_run(self, kind: type[T]) -> T:
        """Return the run's object of a class, made in the run's first call that asks for it."""
        return self.run_state.setdefault(kind, kind())  # type: ignore[no-any-return]


@dataclass(frozen=True)
class RankFeature:
    """The worker's half of a feature of ComfyUI's nodes.

    Attributes:
        key: the name under which the host sends the feature's value among a call's options.
        options: returns the transformer options that ComfyUI's model reads, given the value and the call.
        reads_sigmas: True if the feature reads the sigmas of the call and of the run.
    """

    key: str
    options: Callable[[Any, RankFeatureCall], Mapping[str, Any]]
    reads_sigmas: bool = False


def apply(features: Sequence[RankFeature], options: dict[str, Any], call: RankFeatureCall) -> bool:
    """Replace the values of features among a call's options by the options that ComfyUI's model reads.

    Returns:
        True if a feature reads the sigmas.
    """
    used = [feature for feature in features if feature.key in options]
    for feature in used:
        added = dict(feature.options(options.pop(feature.key), call))
        add_patches(options, added.pop(PATCHES, {}))
        options.update(added)
    return any(feature.reads_sigmas for feature in used)


def add_patches(options: dict[str, Any], patches: Mapping[str, Sequence[Any]]) -> None:
    """Add functions to the option `patches`, whose lists ComfyUI's model calls at places of its forward."""
    for place, functions in patches.items():
        options.setdefault(PATCHES, {}).setdefault(place, []).extend(functions)
