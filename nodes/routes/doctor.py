"""The doctor: GET /parallel/doctor waits for its findings; the panel begins it and hears how far it has got."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
from aiohttp import web

from ...parallel_backend.doctor import Finding, diagnose, diagnose_models
from ..model.trials import FOLDER
from .background import run_in_background
from .route import as_json
from .turn import Turn, TurnTaken

Report = Callable[[str], None]
Look = Callable[[Report], list[Finding]]


def look_at_models(report: Report) -> list[Finding]:
    """The model classes of this ComfyUI."""
    return diagnose_models(str(FOLDER), report)


DISTURBING = "a run is going on, which the doctor would disturb: wait for its end."


class DoctorStatus(msgspec.Struct, frozen=True):
    """What the doctor looks at now (empty if it does not), and its last findings, None before the first."""

    doing: str = ""
    findings: list[Finding] | None = None


class DoctorRoute:
    """Runs once at a time: who asks meanwhile gets the same findings."""

    def __init__(self, turn: Turn) -> None:
        self.status = DoctorStatus()
        self._turn = turn
        self._running: asyncio.Task[list[Finding]] | None = None

    def begin(self, look: Look = diagnose) -> asyncio.Task[list[Finding]]:
        """The run that is going on, or a new one; by default of the machine. Raises TurnTaken."""
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
        """All findings, once the workers have been measured."""
        try:
            running = self.begin()
        except TurnTaken:
            return as_json({"said": DISTURBING}, 409)
        return as_json(await asyncio.shield(running))
