"""A ComfyUI that runs already, in which jobs take their turns with those of its user."""

from __future__ import annotations

from pathlib import Path

from typing_extensions import Self

from ..errors import Cancelled
from .client import Client, Graph, QueuedRun

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
        self._gone: set[str] = set()

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

    def _submit(self, graph: Graph) -> QueuedRun:
        """As a client does, while no other job runs or waits. Raises Cancelled where one does."""
        if self.queued():
            raise Cancelled("a run was queued.")
        run = super()._submit(graph)
        self._done.append(run.prompt_id)
        return run

    def _was_removed(self, prompt_id: str) -> bool:
        """Return True if the graph was already gone at the last look: its last events may still have been on their way
        then.
        """
        gone = prompt_id in self._gone
        if prompt_id not in self.queued():
            self._gone.add(prompt_id)
        return gone

    def queued(self) -> set[str]:
        """The ids of all jobs that run or wait."""
        return {job[1] for jobs in self.get("/queue").values() for job in jobs}
