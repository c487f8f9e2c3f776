"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as text, with a line break at the end of each line."""
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *rows))
