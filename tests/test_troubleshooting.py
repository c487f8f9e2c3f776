"""The troubleshooting page: what it quotes is what the code says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
PAGE = (REPO / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTES = [re.sub(r"\s+", " ", quote) for quote in re.findall(r'"([^"]{12,})"', PAGE)]
BREAK = re.compile(r"[^A-Za-z' _-]+|\b[A-Z_]{3,}\b")
"""Values, punctuation and names such as SIGKILL; what is between them are the message's own words."""

FEWEST = 4
"""Words that tell; fewer may be a value's."""


def runs(text: str) -> list[str]:
    """A text's words without a break."""
    return [" ".join(part.split()).strip(" '") for part in BREAK.split(text)]


@pytest.fixture(scope="module")
def said() -> str:
    """Everything that the code may say."""
    texts: list[str] = []
    for folder in ("parallel_backend", "nodes"):
        for path in sorted((REPO / folder).rglob("*.py")):
            for found in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(found, ast.JoinedStr):
                    texts.append("".join(v.value if isinstance(v, ast.Constant) else "…" for v in found.values))
                elif isinstance(found, ast.Constant) and isinstance(found.value, str):
                    texts.append(found.value)
    return "|".join(run for text in texts for run in runs(text))


@pytest.mark.parametrize("quote", QUOTES)
def test_a_quoted_message_is_in_the_code(said: str, quote: str) -> None:
    assert [run for run in runs(quote) if len(run.split()) >= FEWEST and run not in said] == []


def test_words_that_nothing_says_would_be_found(said: str) -> None:
    assert "the ring has lost its ulysses" not in said
    assert sum(any(len(run.split()) >= FEWEST for run in runs(quote)) for quote in QUOTES) > len(QUOTES) / 2
