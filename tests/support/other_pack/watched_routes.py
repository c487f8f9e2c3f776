"""Records the fields that handlers of ComfyUI's server read of a request, and releases several requests at the same moment."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web
from server import PromptServer

WATCH, TOGETHER = "X-Watch", "X-Together"
"""Request headers: reply with the names that the handler reads; wait until this many requests have arrived."""

READ = "X-Read"
"""Header of the response that lists the names that the handler read."""

WAITING: list[asyncio.Event] = []


class Watched:
    """A request, or its headers, which records the name of everything that the handler reads."""

    def __init__(self, of: Any, read: set[str], prefix: str = "") -> None:
        self._of = of
        self._read = read
        self._prefix = prefix

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._of, name)
        if isinstance(self._of, Mapping) and name == "get":
            return self._get
        if name == "headers":
            return Watched(value, self._read, "headers.")
        self._read.add(self._prefix + name)
        return value

    def __getitem__(self, name: str) -> Any:
        self._read.add(f"{self._prefix}[{name}]")
        return self._of[name]

    def _get(self, name: str, default: Any = None) -> Any:
        self._read.add(self._prefix + name)
        return self._of.get(name, default)


@web.middleware
async def watch(request: web.Request, handler: Callable[[Any], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
    if count := int(request.headers.get(TOGETHER, 0)):
        await request.content.wait_eof()
        WAITING.append(event := asyncio.Event())
        if len(WAITING) == count:
            for each in WAITING:
                each.set()
            WAITING.clear()
            asyncio.get_running_loop().call_soon(time.sleep, 0.2)  # time in which the handlers' threads end
        await event.wait()
    if WATCH not in request.headers:
        return await handler(request)
    read: set[str] = set()
    answer = await handler(Watched(request, read))
    answer.headers[READ] = json.dumps(sorted(read))
    return answer


def fields_of(body: Any) -> list[str] | None:
    """Return the fields of a body's struct, or of the structs in a list. Return `[]` for a text, None without a body."""
    form = getattr(body, "type", None)
    while form is not None and not (isinstance(form, type) and issubclass(form, msgspec.Struct)):
        (form,) = form.__args__
    return None if body is None else [] if form is None else list(form.__struct_encode_fields__)


async def routes(_: web.Request) -> web.Response:
    """Reply with all routes of the server: method, path, the handler's module, and the fields of its body's struct."""
    found = []
    for route in PromptServer.instance.app.router.routes():
        path = route.resource.canonical if route.resource else ""
        body = getattr(getattr(route.handler, "__self__", None), "body", None)
        found.append((route.method, path, route.handler.__module__, fields_of(body)))
    return web.json_response(found)


async def planted(request: web.Request) -> web.Response:
    """Read request fields that none of the pack's routes may read."""
    return web.Response(text=request.query.get("path", "") + request.match_info["file"])


def add_watched_routes() -> None:
    server = PromptServer.instance
    server.app.middlewares.append(watch)
    server.routes.get("/other_pack/routes")(routes)
    server.routes.get("/other_pack/planted/{file}")(planted)
