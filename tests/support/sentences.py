"""The sentences that the page shows in ComfyUI's language."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WORDS = json.loads((Path(__file__).parents[2] / "locales" / "en" / "main.json").read_text(encoding="utf-8"))["parallel"]
VALUE = re.compile(r"\{(\w+)\}")
TYPES: Mapping[str, Mapping[str, Any]] = WORDS["values"]
"""Types of the values in sentences, each with its regular expression and the names of its placeholders."""


def known(text: str, *lists: str) -> bool:
    """Return True if each sentence of a text is in one of these lists, by the matching of web/sentences.js."""
    patterns = [pattern(english) for name in lists for english in WORDS[name]]
    return all(any(each.fullmatch(part) for each in patterns) for part in parts(text))


def parts(text: str) -> list[str]:
    """Return the sentences of a text."""
    return re.split(r"(?<=\.)\s", text)


def pattern(english: str, types: Mapping[str, Mapping[str, Any]] = TYPES) -> re.Pattern[str]:
    """Return the pattern of an English sentence with placeholders, as web/sentences.js makes it."""
    expressions = {name: f"(?:{kind['pattern']})" for kind in types.values() for name in kind["names"]}
    in_turn = enumerate(VALUE.split(english))  # text and names of placeholders
    return re.compile(
        "".join(expressions.get(part, ".+?") if at % 2 else re.escape(part) for at, part in in_turn), re.S
    )
