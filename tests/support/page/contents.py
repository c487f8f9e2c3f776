"""The contents of the page: templates, and badges of the loader."""

from __future__ import annotations

import json
from typing import Any

from scripts.comfyui import REPO

TEMPLATES = sorted(path.stem for path in (REPO / "workflows").glob("*.json"))
SPRITES = "Sprites without a GPU"


def template(name: str) -> dict[str, Any]:
    """Return a template's graph."""
    found: dict[str, Any] = json.loads((REPO / "workflows" / f"{name}.json").read_text(encoding="utf-8"))
    return found


BADGES = """() => app.graph.nodes.find(n => n.type.startsWith("LoadParallel")).badges
    .map(badge => (typeof badge === "function" ? badge() : badge).text)"""
SHOWN = "([badges, pattern]) => eval(badges)().some(text => new RegExp(pattern).test(text))"
"""JavaScript function that returns true if a badge of the loader matches a pattern."""
