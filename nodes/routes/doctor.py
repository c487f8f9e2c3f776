"""The doctor's routes: GET /parallel/doctor waits for the findings; the panel starts the doctor and shows its progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
from aiohttp import web

from ...parallel_backend.doctor import Finding, diagnose, diagnose_models
from ..model.trials import FOLDER
from .background import run_in_background
from .route import as_json
from .turn import Turn, TurnOccupied

Report = Callable[[str], None]
Look = Callable[[Report], list[Finding]]


def look_at_models(report: Report) -> list[Finding]:
    """Return findings about the model classes of this ComfyUI."""
    return diagnose_models(str(FOLDER), report)


DISTURBING = "a run is going on, which the doctor would disturb: wait for its end."


class DoctorStatus(msgspec.Struct, frozen=True):
    """The doctor's present check (empty if it is not running), and its last findings, None before the first run."""

    doing: str = ""
    findings: list[Finding] | None = None


class DoctorRoute:
    """The doctor's route. It runs once at a time, and requests in the meantime get the same findings."""

    def __init__(self, turn: Turn) -> None:
        self.status = DoctorStatus()
        self._turn = turn
        self._running: asyncio.Task[list[Finding]] | None = None

    def begin(self, look: Look = diagnose) -> asyncio.Task[list[Finding]]:
        """Return the task of the running doctor, or start it. By default it examines the machine.

        Raises:
            TurnOccupied: a benchmark or a comparison runs.
        """
        if self._running is None or self._running.done():
            self._running = self._turn.begin(lambda: self._run(look))
        return self._running

    async def _run(self, look: Look) -> list[Finding]:
        findings = self.status.findings

        def report(what: str) -> None:
            self.status = DoctorStatus(what, findings)

        try:
            findings = await run_in_background(lambda: look(report))
        finally:
            self.status = DoctorStatus("", findings)
        return findings

    async def answer(self) -> web.Response:
        """Reply with all findings, after measurements by the workers."""
        try:
            running = self.begin()
        except TurnOccupied:
            return as_json({"said": DISTURBING}, 409)
        return as_json(await asyncio.shield(running))
