"""GET /parallel/doctor: the doctor's findings as JSON. It takes no parameters."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import urllib.parse

import msgspec
from aiohttp import web
from comfy.cli_args import args
from server import PromptServer

from ..parallel_backend.doctor import Finding, diagnose

PATH = "/parallel/doctor"


class DoctorRoute:
    """Answers once the workers have been measured; who asks meanwhile gets the same findings."""

    def __init__(self) -> None:
        self._running: asyncio.Task[list[Finding]] | None = None

    async def answer(self, request: web.Request) -> web.Response:
        """The findings, or 403 for a page that has this machine's address behind a name of its own (DNS rebinding)."""
        names = await asyncio.to_thread(lambda: {socket.gethostname(), socket.getfqdn(), *args.listen.split(",")})
        if not is_ours(request.host, names):
            said = f"{request.host!r} is not this machine's name: ask by its IP address, or by {socket.gethostname()}."
            return web.Response(status=403, text=said)
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(asyncio.to_thread(diagnose))
        findings = await asyncio.shield(self._running)
        return web.Response(body=msgspec.json.encode(findings), content_type="application/json")


def is_ours(host: str, names: set[str]) -> bool:
    """Whether a Host header means this machine: an IP address, which no name server can have turned, or one of its names.

    Args:
        names: what this machine is called, besides localhost; each also with .local behind it.
    """
    try:
        name = (urllib.parse.urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    ours = {each.strip().lower().rstrip(".") for each in names} - {""}
    if name == "localhost" or name.endswith(".localhost") or name.removesuffix(".local") in ours or name in ours:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def add_route() -> None:
    """Have ComfyUI's server answer it."""
    PromptServer.instance.routes.get(PATH)(DoctorRoute().answer)
