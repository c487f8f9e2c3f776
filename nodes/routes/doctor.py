"""The doctor: GET /parallel/doctor waits for its findings; the panel begins it and hears how far it has got."""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from ...parallel_backend.doctor import Finding, diagnose
from .guard import guarded


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

    def begin(self) -> asyncio.Task[list[Finding]]:
        """The run that is going on, or a new one."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())
        return self._running

    async def _run(self) -> list[Finding]:
        findings = self.status.findings

        def report(what: str) -> None:
            self.status = DoctorStatus(what, findings)

        try:
            findings = await asyncio.to_thread(diagnose, report)
        finally:
            self.status = DoctorStatus("", findings)
        return findings

    async def _answer(self, request: web.Request) -> web.Response:
        """All findings, once the workers have been measured."""
        findings = await asyncio.shield(self.begin())
        return web.Response(body=msgspec.json.encode(findings), content_type="application/json")
