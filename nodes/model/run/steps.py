"""What is shown of each step of a run: on the node, and to the callback that ComfyUI gave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...progress import NodeRun


@dataclass(frozen=True)
class Steps:
    """Shows a run's steps.

    Attributes:
        run: what the node shows of the run.
        callback: ComfyUI's own, if there is one.
    """

    run: NodeRun
    callback: Callable[..., Any] | None

    def show(self, step: int, *rest: Any) -> None:
        """A step, from 0, is done; `rest` goes to the callback."""
        self.run.step(step + 1)
        if self.callback is not None:
            self.callback(step, *rest)
