"""Streams that come from the stage before, begun to be received one patch ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...mesh import Mesh
from ..inputs import PatchForward


class Coming(NamedTuple):
    """A stream's tokens that come."""

    shape: torch.Size
    dtype: torch.dtype


class Arrivals:
    """What comes is known from the same patch's forward in an earlier call; in the first one nothing is begun ahead."""

    def __init__(self, mesh: Mesh) -> None:
        self._axis = mesh.from_previous_stage
        self._source = mesh.pipefusion.rank - 1
        self._known: dict[PatchForward, list[Coming]] = {}
        self._requested: list[Coming] = []
        self._begun: deque[tuple[Coming, Callable[[], Tensor]]] = deque()
        self._ahead: PatchForward | None = None

    def enter(self, forward: PatchForward | None, next_forward: PatchForward | None) -> None:
        """A forward begins, of a patch or (None) of the whole: receive what comes for it and for the one behind it."""
        assert self._ahead in (None, forward), "another forward was said to come"
        known = self._ahead is not None or self._begin(forward)
        self._ahead = next_forward if known and self._begin(next_forward) else None
        self._requested = []
        if forward is not None:
            self._known[forward] = self._requested

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Wait for the next stream."""
        coming = Coming(shape, dtype)
        self._requested.append(coming)
        if not self._begun:
            return self._axis.receive(shape, dtype, self._source)
        begun, wait = self._begun.popleft()
        assert begun == coming, "another stream was said to come"
        return wait()

    def _begin(self, forward: PatchForward | None) -> bool:
        if forward is None or forward not in self._known:
            return False
        for coming in self._known[forward]:
            self._begun.append((coming, self._axis.start_receive(*coming, self._source)))
        return True
