"""The messages that the troubleshooting page quotes are those of the code."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.refusals.of_flux import PLANS
from tests.refusals.sentences import strings
from tests.support.nodes_module import nodes_module

REPO = Path(__file__).parents[2]
PAGE = (REPO / "docs" / "guide" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTES = [re.sub(r"\s+", " ", quote) for quote in re.findall(r'"([^"]{12,})"', PAGE)]
BREAK = re.compile(r"[^A-Za-z' _-]+|\b[A-Z_]{3,}\b")
"""Values, punctuation and names such as SIGKILL. The words between them are the message's own."""

FEWEST = 4
"""Number of words that identify a message; fewer may be part of a value."""


def runs(text: str) -> list[str]:
    """Return the runs of words of a text without a break."""
    return [" ".join(part.split()).strip(" '") for part in BREAK.split(text)]


def unsaid(quote: str, said: str) -> list[str]:
    """Return a quotation's runs of at least FEWEST words that the code does not contain."""
    return [run for run in runs(quote) if len(run.split()) >= FEWEST and run not in said]


def test_quoted_messages_are_in_the_code() -> None:
    said = "|".join(run for text in strings() for run in runs(text))
    assert len(QUOTES) > 100
    assert sum(any(len(run.split()) >= FEWEST for run in runs(quote)) for quote in QUOTES) > len(QUOTES) / 2
    assert {quote: lost for quote in QUOTES if (lost := unsaid(quote, said))} == {}
    assert unsaid("worker 7 says: the ring has lost its ulysses", said) == ["the ring has lost its ulysses"]


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Provide the module that finds the entries of the page."""
    return nodes_module("troubleshooting", monkeypatch)


TITLES = ("error.", "outcome.slow")
"""Beginnings of the keys of the page's texts that are titles of messages and marks."""


def test_each_message_title_and_sentence_of_a_plan_has_its_entry(page: ModuleType) -> None:
    """The sentences of plans are those of ComfyUI's server, with their numbers."""
    assert len(page.entries()) > 80
    lost = {}
    for entry in page.entries():
        for quote in re.findall(r"\*\*(.+?)\*\*", entry.text, re.DOTALL):
            said = " ".join(quote.split()).strip('"').replace("…", "17")
            telling = sum(map(len, page.words_of(said))) >= page.LEAST or not re.search('["…]', quote)
            if telling and page.entry_of(said) != entry.id:
                lost[said] = page.entry_of(said)
    assert lost == {}
    assert page.entry_of("Another pack's node failed: list index out of range") == ""
    texts = json.loads((REPO / "locales" / "en" / "main.json").read_text(encoding="utf-8"))["parallel"]["texts"]
    titles = [text for key, text in texts.items() if key.startswith(TITLES)]
    plans = [sentence for _, sentence in PLANS.values()]
    assert len(titles) >= 6 and len(plans) > 5
    shown = (*titles, *plans, "no GPU is visible", "Windows", "WSL")
    assert [text for text in shown if not page.entry_of(text)] == []


def test_the_page_has_every_entry_as_html_with_its_id(page: ModuleType) -> None:
    made = page.as_html()
    assert re.findall(r'<li id="(entry-\d+)">', made) == [entry.id for entry in page.entries()]
    text = html.unescape(re.sub(r"<[^>]+>", "", made))
    for entry in page.entries():
        plain = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", re.sub(r"[*`]", "", entry.text))
        assert " ".join(plain.split()) in " ".join(text.split())
