"""Report the steps of a run on the node and to ComfyUI's callback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...progress import NodeRun


@dataclass(frozen=True)
class Steps:
    """The recipients of a run's steps.

    Attributes:
        run: the run as the node shows it.
        callback: ComfyUI's callback, if there is one.
    """

    run: NodeRun
    callback: Callable[..., Any] | None

    def show(self, step: int, *rest: Any) -> None:
        """Report that a step, counted from 0, is done, and pass `rest` to the callback."""
        self.run.step(step + 1)
        if self.callback is not None:
            self.callback(step, *rest)
