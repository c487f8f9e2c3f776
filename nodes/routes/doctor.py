"""The doctor: GET /parallel/doctor waits for its findings; the panel begins it and hears how far it has got."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
from aiohttp import web

from ...parallel_backend.doctor import Finding, diagnose, diagnose_models
from ..model.verdicts import FOLDER
from .aside import aside
from .guard import guarded

Report = Callable[[str], None]
Look = Callable[[Report], list[Finding]]


def look_at_models(report: Report) -> list[Finding]:
    """The model classes of this ComfyUI."""
    return diagnose_models(str(FOLDER), report)


class DoctorStatus(msgspec.Struct, frozen=True):
    """What the doctor looks at now (empty if it does not), and its last findings, None before the first."""

    doing: str = ""
    findings: list[Finding] | None = None


class DoctorRoute:
    """Runs once at a time: who asks meanwhile gets the same findings."""

    def __init__(self) -> None:
        self.status = DoctorStatus()
        self.answer = guarded(self._answer)
        self._running: asyncio.Task[list[Finding]] | None = None

    def begin(self, look: Look = diagnose) -> asyncio.Task[list[Finding]]:
        """The run that is going on, or a new one; by default of the machine."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run(look))
        return self._running

    async def _run(self, look: Look) -> list[Finding]:
        findings = self.status.findings

        def report(what: str) -> None:
            self.status = DoctorStatus(what, findings)

        try:
            findings = await aside(lambda: look(report))
        finally:
            self.status = DoctorStatus("", findings)
        return findings

    async def _answer(self, request: web.Request) -> web.Response:
        """All findings, once the workers have been measured."""
        findings = await asyncio.shield(self.begin())
        return web.Response(body=msgspec.json.encode(findings), content_type="application/json")
