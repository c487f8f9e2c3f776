"""The troubleshooting page as HTML, and the search for the page's entry about a message."""

from __future__ import annotations

import functools
import html
import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "guide" / "troubleshooting.md"

HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>ComfyUI-Parallel: troubleshooting</title><style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46em; margin: 2em auto; padding: 0 1em; color-scheme: light dark }
li { margin: 0.6em 0 } li:target { outline: 2px solid #f5b301; outline-offset: 0.4em } code { font-size: 0.9em }
</style></head><body>
"""

BREAK = re.compile(r"[^A-Za-z' _-]+|\b[A-Z_]{3,}\b")
"""Separators in a quoted message: values, punctuation and upper-case names. The text between them is fixed words."""

LEAST = 12
"""Smallest number of letters that a message must share with a quotation."""


@dataclass(frozen=True)
class TroubleshootingEntry:
    """An item of the page.

    Attributes:
        id: the item's id on the page.
        text: the item's text in Markdown.
        quoted: for each message or title that the item begins with, its fixed words.
    """

    id: str
    text: str
    quoted: tuple[tuple[str, ...], ...]

    def fits(self, message: str) -> int:
        """Return the most letters that a quotation shares with a message; 0 if no quotation counts.

        A quotation counts only if the message has all its words.
        """
        whole = [runs for runs in self.quoted if runs and all(run in message for run in runs)]
        return max((sum(map(len, runs)) for runs in whole), default=0)


@functools.cache
def entries() -> tuple[TroubleshootingEntry, ...]:
    """Return all entries, in the page's order."""
    items = re.findall(r"^- (\*\*.*?)(?=^- |^#|\Z)", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return tuple(
        TroubleshootingEntry(f"entry-{number}", text.strip(), _quoted(text)) for number, text in enumerate(items, 1)
    )


def entry_of(message: str) -> str:
    """Return the id of the entry that shares the most letters with a message or title; empty if there is none."""
    text = " ".join(message.split())
    best = max(entries(), key=lambda entry: entry.fits(text))
    return best.id if best.fits(text) >= LEAST or any((text,) in entry.quoted for entry in entries()) else ""


def as_html() -> str:
    """Return the page as HTML, with an id for each entry."""
    numbered = iter(entries())
    text = PAGE.read_text(encoding="utf-8")
    parts = [HEAD]
    for block in re.split(r"^(?=- |#|$)", text, flags=re.MULTILINE):
        heading = re.match(r"(#+) (.+)", block)
        if heading:
            level, title = len(heading[1]), heading[2]
            anchor = re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")
            parts.append(f'<h{level} id="{anchor}">{_inline(title)}</h{level}>')
        elif block.startswith("- **"):
            parts.append(f'<ul><li id="{next(numbered).id}">{_inline(block[2:])}</li></ul>')
        elif block.startswith("- "):
            parts.append(f"<ul><li>{_inline(block[2:])}</li></ul>")
        elif block.strip():
            parts.append(f"<p>{_inline(block)}</p>")
    return "\n".join([*parts, "</body></html>"])


def _quoted(text: str) -> tuple[tuple[str, ...], ...]:
    """Return the phrases in bold: the fixed words of messages in quotation marks, and titles."""
    bold = [" ".join(phrase.split()) for phrase in re.findall(r"\*\*(.+?)\*\*", text, re.DOTALL)]
    return tuple(words_of(phrase.strip('"')) if phrase.startswith('"') else (phrase,) for phrase in bold)


def words_of(quotation: str) -> tuple[str, ...]:
    """Return a quotation's fixed words, in runs of at least two words. The rest of the quotation is values."""
    runs = (run.strip(" '") for run in BREAK.split(quotation))
    return tuple(run for run in runs if " " in run)


def _inline(text: str) -> str:
    """Convert Markdown within a paragraph to HTML. Keep links within this page, and replace other links by their text."""
    markup = html.escape(text.strip(), quote=False)
    markup = re.sub(r"`([^`]+)`", r"<code>\1</code>", markup)
    markup = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", markup, flags=re.DOTALL)
    markup = re.sub(r"\*(.+?)\*", r"<i>\1</i>", markup, flags=re.DOTALL)
    markup = re.sub(r"\[([^\]]+)\]\((#[^)]+)\)", r'<a href="\2">\1</a>', markup)
    return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", markup)
