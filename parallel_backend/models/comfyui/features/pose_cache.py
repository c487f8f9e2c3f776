"""Wan Animate 2's cache of what goes into its blocks' pose branch: ComfyUI's own, which each rank has for its tokens."""

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
"""Where the model looks for it among its options."""

MODULE, CLASS = "comfy.ldm.wan.model_animate2", "PoseBranchCache"


def pose_cache(settings: Mapping[str, Any], call: RankFeatureCall) -> Mapping[str, Any]:
    """Return the run's cache, of which a split forward stores this rank's tokens."""
    cache = call.of_run(RunPoseCache).cache(settings, call.device)
    return {OPTION: cache if call.forward is None else RankPoses(cache, call.forward.call)}


class RunPoseCache:
    """The cache of a run, made when a call first asks for it."""

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
    """ComfyUI's cache as one forward sees it: streams go in and come out, this rank's tokens of them are kept."""

    def __init__(self, cache: Any, call: CallLayout) -> None:
        self._cache = cache
        self._call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def put(self, block: int, poses: Tensor) -> None:
        """What goes into a block."""
        stream = poses if isinstance(poses, Stream) else self._call.stream(poses, FirstPatchTokens())
        self._cache.slot["length"] = stream.placement.length
        self._cache.put(block, stream.local)

    def take(self, block: int, device: torch.device, dtype: torch.dtype, batch_size: int) -> Stream:
        """It, for each of a batch."""
        local = self._cache.take(block, device, dtype, batch_size)
        return Stream(
            local,
            self._call.layout.of(self._cache.slot["length"], FirstPatchTokens()),
            FirstPatchTokens.dim,
            self._call,
        )
