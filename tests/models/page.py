"""Patterns that read docs/guide/models.md, the guide's page of models."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "models.md"
ROW = re.compile(r"^\| `(\w+)` \| (.+) \| (.+) \|$", re.MULTILINE)
NEWER = re.compile(r"\bfrom ComfyUI 0\.\d+\b")
"""The mark of a row whose class only newer ComfyUIs have."""
