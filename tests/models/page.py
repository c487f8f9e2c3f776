"""The page of models, as it is read."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "models.md"
ROW = re.compile(r"^\| `(\w+)` \| (.+) \| (.+) \|$", re.MULTILINE)
NEWER = re.compile(r"\bfrom ComfyUI 0\.\d+\b")
"""How a row is marked whose class only newer ComfyUIs have."""
