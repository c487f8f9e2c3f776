"""The turn: a benchmark, a comparison or the doctor, of which one runs at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

FAILED = "it has failed: ComfyUI's console says how."
"""The page shows this sentence where a job ends with an error that nobody foresaw."""


class TurnTaken(Exception):
    """Another job has the turn."""


class Turn:
    """The right to use all workers for a job that is no prompt.

    The job's own task is all that says whether the turn is taken. A job gives it back when its task ends, however it ends.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None

    @property
    def is_running(self) -> bool:
        """Return True if a job is running."""
        return self._task is not None and not self._task.done()

    def begin(self, job: Callable[[], Coroutine[Any, Any, Result]]) -> asyncio.Task[Result]:
        """Take the turn and start a job. Raises TurnTaken."""
        if self.is_running:
            raise TurnTaken
        task = asyncio.create_task(job())
        self._task = task
        return task
