"""Constants that tests of derived classes share: the time limit of a derivation, and the node's messages during it."""

from __future__ import annotations

import re
from pathlib import Path

PATIENCE = 3600.0
"""Seconds allowed for a derivation, on a machine that other tests share."""

FOUND = re.compile(r"Parallel: new model (\w+): worked out how to split it \(\d+ s, once; (.*)\): queue again")
FINDING = "New model: working out how to split the model, once"


def own_cache(folder: Path) -> dict[str, str]:
    """Return the environment of a ComfyUI that has derived nothing yet."""
    return {"XDG_CACHE_HOME": str(folder / "cache"), "PARALLEL_DEADLINES": f"derive={PATIENCE}"}
