"""The troubleshooting page, and which of its entries speaks of a message."""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from ..troubleshooting import as_html, entry_of


async def show_page(_: web.Request) -> web.Response:
    """The page, each entry with its id."""
    return web.Response(text=await asyncio.to_thread(as_html), content_type="text/html")


async def find_entry(request: web.Request) -> web.Response:
    """Of a message, which is the body: the entry's id, empty where there is none."""
    found = {"entry": entry_of(await request.text())}
    return web.Response(body=msgspec.json.encode(found), content_type="application/json")
