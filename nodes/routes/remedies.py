"""The troubleshooting page, and which of its entries speaks of a message."""

from __future__ import annotations

from aiohttp import web

from ..troubleshooting import as_html, entry_of
from .route import as_json


def show_page() -> web.Response:
    """The page, each entry with its id."""
    return web.Response(text=as_html(), content_type="text/html")


def find_entry(message: str) -> web.Response:
    """Of a message: the entry's id, empty where there is none."""
    return as_json({"entry": entry_of(message)})
