"""The versions of diffusers that the pack supports, stated once."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from ..errors import Refused

OLDEST_DIFFUSERS = (0, 35)
NEWEST_DIFFUSERS = (0, 42)


def check_versions() -> None:
    """Raises Refused where diffusers is missing or outside the supported range."""
    allowed = f"{_text(OLDEST_DIFFUSERS)} to {_text(NEWEST_DIFFUSERS)}"
    remedy = "run pip install -r requirements.txt in the pack's folder with ComfyUI's Python"
    try:
        found = version("diffusers")
    except PackageNotFoundError:
        raise Refused(f"diffusers is not installed and {allowed} is needed: {remedy}.") from None
    parts = tuple(int(number) for number in re.findall(r"\d+", found)[:2])
    if not OLDEST_DIFFUSERS <= parts <= NEWEST_DIFFUSERS:
        raise Refused(f"diffusers {found} is installed and {allowed} is supported: {remedy}.")


def _text(parts: tuple[int, int]) -> str:
    return ".".join(str(part) for part in parts)
