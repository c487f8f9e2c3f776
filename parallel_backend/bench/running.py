"""A ComfyUI that runs already, in which jobs take their turns with those of its user."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from typing_extensions import Self

from ..errors import Cancelled
from .client import Client, Graph, Progress, Run, Text

LOOK = 5.0
"""Seconds after which the queue is looked at again: what is taken out of it never tells an event."""

ANSWER = 30.0
"""Seconds in which its events have to begin."""


class Running(Client):
    """For use in a `with` statement, which ends by taking the jobs out of the history. A job of the user's ends it.

    Args:
        url: where it answers.
        output: its output folder.
    """

    def __init__(self, url: str, output: Path) -> None:
        super().__init__()
        self.url = url
        self._output = output
        self._done: list[str] = []

    def __enter__(self) -> Self:
        self._listen(ANSWER)
        return self

    def __exit__(self, *_: object) -> None:
        self._listen_no_more()
        self._post("/history", {"delete": self._done})

    def folder(self, kind: str) -> Path:
        """Its output folder, where jobs save latents."""
        assert kind == "output"
        return self._output

    def queue(
        self,
        graph: Graph,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        on_text: Callable[[Text], None] | None = None,
        timeout: float = 120,
    ) -> Run:
        """As a client does, while no other job runs or waits. Raises Cancelled where one does, or where it is taken out."""
        if self.queued():
            raise Cancelled("a run was queued.")
        return super().queue(graph, on_progress=on_progress, on_text=on_text, timeout=timeout)

    def wait(
        self,
        prompt_id: str,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        on_text: Callable[[Text], None] | None = None,
        timeout: float = 120,
    ) -> Run:
        """As a client does. Raises Cancelled where the job is no longer in the queue and has told nothing."""
        self._done.append(prompt_id)
        deadline = time.monotonic() + timeout
        while True:
            gone = prompt_id not in self.queued()
            try:
                return super().wait(prompt_id, on_progress=on_progress, on_text=on_text, timeout=LOOK)
            except TimeoutError:
                if gone:
                    raise Cancelled("its job was taken out of the queue.") from None
                if time.monotonic() > deadline:
                    raise

    def queued(self) -> set[str]:
        """The ids of all jobs that run or wait."""
        return {job[1] for jobs in self.get("/queue").values() for job in jobs}
