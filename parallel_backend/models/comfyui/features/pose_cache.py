"""Wan Animate 2's cache of the inputs of its blocks' pose branch. It is ComfyUI's class; each rank caches its own tokens."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ....declaration import FirstPatchTokens
from ...sequence_parallel.call_layout import CallLayout
from ...sequence_parallel.stream import Stream
from .feature import RankFeatureCall

OPTION = "animate2_cache"
"""The transformer option in which the model looks for the cache."""

MODULE, CLASS = "comfy.ldm.wan.model_animate2", "PoseBranchCache"


def pose_cache(settings: Mapping[str, Any], call: RankFeatureCall) -> Mapping[str, Any]:
    """Return the option with the run's cache. A parallel forward stores only this rank's tokens in it."""
    cache = call.of_run(RunPoseCache).cache(settings, call.device)
    return {OPTION: cache if call.forward is None else RankPoses(cache, call.forward.call)}


class RunPoseCache:
    """The cache of a run, which is made when a call first asks for it."""

    def __init__(self) -> None:
        self._cache: Any = None

    def cache(self, settings: Mapping[str, Any], device: torch.device) -> Any:
        """Return ComfyUI's cache with the node's settings."""
        if self._cache is None:
            store = device if settings["on_device"] else torch.device("cpu")
            self._cache = getattr(import_module(MODULE), CLASS)(store_device=store, dtype=settings["dtype"])
            weakref.finalize(self, self._cache.free)
        return self._cache


class RankPoses:
    """A wrapper of ComfyUI's cache for one forward. It takes and returns streams, and stores this rank's tokens of them."""

    def __init__(self, cache: Any, call: CallLayout) -> None:
        self._cache = cache
        self._call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def put(self, block: int, poses: Tensor) -> None:
        """Store the poses that go into a block."""
        stream = poses if isinstance(poses, Stream) else self._call.stream(poses, FirstPatchTokens())
        self._cache.slot["length"] = stream.placement.length
        self._cache.put(block, stream.local)

    def take(self, block: int, device: torch.device, dtype: torch.dtype, batch_size: int) -> Stream:
        """Return the poses of a block for each item of a batch."""
        local = self._cache.take(block, device, dtype, batch_size)
        return Stream(
            local,
            self._call.layout.of(self._cache.slot["length"], FirstPatchTokens()),
            FirstPatchTokens.dim,
            self._call,
        )
