"""GET /parallel/doctor: the doctor's findings as JSON. It takes no parameters."""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web
from server import PromptServer

from ..parallel_backend.doctor import diagnose

PATH = "/parallel/doctor"

_at_a_time = asyncio.Lock()


async def doctor(_: web.Request) -> web.Response:
    """Answer once the workers have been measured; one request at a time."""
    async with _at_a_time:
        findings = await asyncio.to_thread(diagnose)
    return web.Response(body=msgspec.json.encode(findings), content_type="application/json")


def add_route() -> None:
    """Have ComfyUI's server answer it."""
    PromptServer.instance.routes.get(PATH)(doctor)
