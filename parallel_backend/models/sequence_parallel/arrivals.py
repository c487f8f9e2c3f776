"""Streams from the previous pipeline stage, whose receive operations start one patch ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...mesh import Mesh
from ..inputs import PatchForward


class Coming(NamedTuple):
    """The shape and dtype of a stream's tokens that arrive from the previous stage."""

    shape: torch.Size
    dtype: torch.dtype


class Arrivals:
    """The streams that arrive from the previous stage, in order.

    The streams of a patch's forward are known from the same forward in an earlier model call. In the first call, no receive
    operation starts ahead.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._axis = mesh.from_previous_stage
        self._source = mesh.pipefusion.rank - 1
        self._known: dict[PatchForward, list[Coming]] = {}
        self._requested: list[Coming] = []
        self._begun: deque[tuple[Coming, Callable[[], Tensor]]] = deque()
        self._ahead: PatchForward | None = None

    def enter(self, forward: PatchForward | None, next_forward: PatchForward | None) -> None:
        """Begin the forward of a patch, or of the whole latent (None). Start to receive its streams and the next forward's."""
        assert self._ahead in (None, forward), "another forward was said to come"
        known = self._ahead is not None or self._begin(forward)
        self._ahead = next_forward if known and self._begin(next_forward) else None
        self._requested = []
        if forward is not None:
            self._known[forward] = self._requested

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Wait for the next stream and return its tokens."""
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
