"""The turn, which lets only one of benchmark, comparison and doctor run at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

FAILED = "it failed: ComfyUI's console has the error."
"""Sentence on the page after a job with an unexpected error."""


class TurnOccupied(Exception):
    """An error that says that another job has the turn."""


class Turn:
    """The right to use all workers for a job other than a prompt.

    The turn is taken while the job's task runs, and free once the task ends in any way.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None

    @property
    def is_running(self) -> bool:
        """Return True if a job is running."""
        return self._task is not None and not self._task.done()

    def begin(self, job: Callable[[], Coroutine[Any, Any, Result]]) -> asyncio.Task[Result]:
        """Take the turn and start a job. Raise TurnOccupied if another job runs."""
        if self.is_running:
            raise TurnOccupied
        task = asyncio.create_task(job())
        self._task = task
        return task
