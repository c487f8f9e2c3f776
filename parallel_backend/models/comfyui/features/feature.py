"""Features of ComfyUI's nodes in a worker: what the host sends of them becomes transformer options that ComfyUI's model reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ...inputs import Inputs
from ...sequence_parallel.forward import RankForward

T = TypeVar("T")

PATCHES = "patches"
"""The option in which ComfyUI's models find functions to call at places of their own, a list for each place."""


@dataclass(frozen=True)
class RankFeatureCall:
    """One model call on a rank, as features see it.

    Attributes:
        inputs: the call's inputs.
        device: the rank's device.
        run_state: what features keep from call to call of a run, by its type.
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
    """A feature of ComfyUI's nodes, in a worker.

    Attributes:
        key: the name among a call's options under which the host sends the feature's value.
        options: returns the transformer options that ComfyUI's model reads, from the value.
        reads_sigmas: the feature reads the sigmas of the call and of the run.
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
    """Add functions to those that ComfyUI's model calls at its places."""
    for place, functions in patches.items():
        options.setdefault(PATCHES, {}).setdefault(place, []).extend(functions)
