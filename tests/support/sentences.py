"""The sentences that the page shows in ComfyUI's language."""

from __future__ import annotations

import json
import re
from pathlib import Path

WORDS = json.loads((Path(__file__).parents[2] / "locales" / "en" / "main.json").read_text(encoding="utf-8"))["parallel"]
VALUE = re.compile(r"\{\w+\}")


def known(text: str, *lists: str) -> bool:
    """Return True if each sentence of a text is in one of these lists, by the matching of web/sentences.js."""
    patterns = [".+?".join(map(re.escape, VALUE.split(english))) for name in lists for english in WORDS[name]]
    return all(any(re.fullmatch(each, part, re.S) for each in patterns) for part in re.split(r"(?<=\.)\s", text))
