"""Who may ask: this machine's own pages, and those that ComfyUI was told to answer."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import urllib.parse

from aiohttp import web
from comfy.cli_args import args

PROXY = "behind a proxy, start ComfyUI with --enable-cors-header and the page's address."


async def refusal_of(request: web.Request) -> str:
    """Return why a request is not answered; empty where it is.

    A page of another origin may not ask, nor one that has this machine's address behind a name of its own (DNS rebinding).
    What ComfyUI's --enable-cors-header names may ask.
    """
    allowed = args.enable_cors_header or ""
    names = await asyncio.to_thread(
        lambda: {socket.gethostname(), socket.getfqdn(), *args.listen.split(","), host_of(allowed)}
    )
    if allowed != "*" and not is_ours(request.host, names):
        return (
            f"{request.host!r} is not this machine's name: ask by its IP address, or by {socket.gethostname()}; {PROXY}"
        )
    origin = request.headers.get("Origin")
    if allowed not in ("*", origin) and is_foreign(origin, request.headers.get("Sec-Fetch-Site"), request.host):
        return f"A page of {origin or 'another site'} may not ask this; {PROXY}"
    return ""


def is_foreign(origin: str | None, fetch_site: str | None, host: str) -> bool:
    """Whether the browser says that a page of another origin asks.

    Args:
        origin, fetch_site, host: the headers of these names; programs other than browsers send but the last.
    """
    if fetch_site in ("cross-site", "same-site"):
        return True
    return origin is not None and urllib.parse.urlsplit(origin).netloc.lower() != host.lower()


def is_ours(host: str, names: set[str]) -> bool:
    """Return True if a Host header means this machine: an IP address, which no name server can redirect, or one of its
    names.

    Args:
        names: what this machine is called, besides localhost; each also with .local behind it.
    """
    name = host_of(f"//{host}")
    ours = {own_name.strip().lower().rstrip(".") for own_name in names} - {""}
    if name == "localhost" or name.endswith(".localhost") or name.removesuffix(".local") in ours or name in ours:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def host_of(address: str) -> str:
    """The host of an address, without port; empty if there is none."""
    try:
        return (urllib.parse.urlsplit(address).hostname or "").rstrip(".")
    except ValueError:
        return ""
