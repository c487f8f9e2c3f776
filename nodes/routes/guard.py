"""Access to the routes, for pages of this machine and for pages that ComfyUI's options allow."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import urllib.parse

from aiohttp import web
from comfy.cli_args import args

PROXY = "behind a proxy, start ComfyUI with --enable-cors-header and the page's address."


async def refusal_of(request: web.Request) -> str:
    """Return the reason for refusing a request; empty if it is allowed.

    A page of another origin is refused, and so is a page whose own domain name points to this machine (DNS rebinding). The
    origin in ComfyUI's --enable-cors-header is allowed.
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
        return f"A page of {origin or 'another site'} may not use this address; {PROXY}"
    return ""


def is_foreign(origin: str | None, fetch_site: str | None, host: str) -> bool:
    """Return True if the browser says that a page of another origin sent the request.

    Args:
        origin, fetch_site, host: the headers of these names. Programs other than browsers send only the last.
    """
    if fetch_site in ("cross-site", "same-site"):
        return True
    return origin is not None and urllib.parse.urlsplit(origin).netloc.lower() != host.lower()


def is_ours(host: str, names: set[str]) -> bool:
    """Return True if a Host header names this machine.

    An IP address does, because no name server can redirect it, and so do the machine's names.

    Args:
        host: the header.
        names: the machine's names besides localhost. Each also counts with .local appended.
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
    """Return the host of an address, without port; empty if there is none."""
    try:
        return (urllib.parse.urlsplit(address).hostname or "").rstrip(".")
    except ValueError:
        return ""
