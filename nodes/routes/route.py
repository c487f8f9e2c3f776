"""Routes: the address, the form of the body, and the handler.

A handler gets the decoded body and nothing else, so it cannot read other parts of a request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from .background import run_in_background
from .body import Body, WrongBody, read
from .guard import refusal_of

Answer = Callable[..., Awaitable[web.Response]]
"""A handler that makes the reply, given the decoded body, or nothing for a route without body."""


@dataclass(frozen=True)
class Route:
    """A handler at an address under /parallel/. The body of a route without `body` is never read."""

    method: str
    name: str
    answer: Answer
    body: Body | None = None

    async def handle(self, request: web.Request) -> web.Response:
        """Reply to a request: 403 to a page without access, 400 or 413 to a wrong body, each with a sentence."""
        if refusal := await refusal_of(request):
            return web.Response(status=403, text=refusal)
        if self.body is None:
            return await self.answer()
        body = self.body
        try:
            content = await read(request, body.most)
            decoded = await run_in_background(lambda: body.decoded(content))
        except WrongBody as wrong:
            return web.Response(status=wrong.status, text=str(wrong))
        return await self.answer(decoded)


def in_thread(work: Callable[..., web.Response]) -> Answer:
    """Return a handler that runs in a thread, so that ComfyUI's event loop continues."""

    async def answer(*arguments: Any) -> web.Response:
        return await run_in_background(lambda: work(*arguments))

    return answer


def as_json(content: object, status: int = 200) -> web.Response:
    """Return a JSON reply."""
    return web.Response(body=msgspec.json.encode(content), status=status, content_type="application/json")
