"""Routes of the troubleshooting page, and of the search for the entry about a message."""

from __future__ import annotations

from aiohttp import web

from ..troubleshooting import as_html, entry_of
from .route import as_json


def show_page() -> web.Response:
    """Reply with the page, with an id for each entry."""
    return web.Response(text=as_html(), content_type="text/html")


def find_entry(message: str) -> web.Response:
    """Reply with the id of the entry about a message; empty if there is none."""
    return as_json({"entry": entry_of(message)})
