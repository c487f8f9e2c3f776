"""What tests of classes that nobody declared share: how long it may take to derive one, and what the node says meanwhile."""

from __future__ import annotations

import re
from pathlib import Path

PATIENCE = 3600.0
"""Seconds to derive in, on a machine that other tests share."""

FOUND = re.compile(r"Parallel: new model (\w+): worked out how to split it \(\d+ s, once; (.*)\): queue again")
FINDING = "New model: working out how to split it, once"


def own_cache(folder: Path) -> dict[str, str]:
    """Of a ComfyUI that has derived nothing yet."""
    return {"XDG_CACHE_HOME": str(folder / "cache"), "PARALLEL_DEADLINES": f"derive={PATIENCE}"}
