"""The templates' notes are readable in the page, as the page draws them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.support.page.browser import SET, open_graph
from tests.support.page.contents import TEMPLATES, template
from tests.support.page.contrasts import CONTRASTS, LEGIBLE
from tests.support.selection import thorough

NOTES = ".comfy-markdown-content"
"""CSS class of a note's text in Nodes 2.0. The old canvas paints the background, so styles do not give its colour there."""


BROWN = "#5f4f30"
"""The page's own yellow, #653, a little darker, because links on #653 have a contrast of 4.49.

In a light theme the page adds half to a colour's lightness, so that black would be grey.
"""


def notes_of(name: str) -> list[dict[str, Any]]:
    """Return the notes that are visible when a template opens."""
    return [each for each in template(name)["nodes"] if each["type"] == "MarkdownNote"]


def is_brown(note: dict[str, Any]) -> bool:
    """Return True if a note has the notes' colours and no code within a line.

    Nodes 2.0 draws such code blue in every theme.
    """
    (text,) = note["widgets_values"]
    code = "`" in re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return (note["color"], note["bgcolor"]) == ("#432", BROWN) and not code


def test_notes_are_brown_and_have_no_code_within_a_line() -> None:
    notes = [(name, note) for name in TEMPLATES for note in notes_of(name)]
    assert len(notes) > 10
    assert [name for name, note in notes if not is_brown(note)] == []
    (_, note), *_ = notes
    for planted in ({"bgcolor": "#653"}, {"widgets_values": ["run `this`"]}):
        assert not is_brown(note | planted)


@thorough
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_note_is_readable_in_nodes_2(page: Page, theme: str) -> None:
    page.evaluate(SET, ["Comfy.VueNodes.Enabled", True])
    page.evaluate(SET, ["Comfy.ColorPalette", theme])
    hidden = {}
    for name in TEMPLATES:
        open_graph(page, name)
        notes = page.locator(NOTES)
        expect(notes).to_have_count(len(notes_of(name)))
        for note in notes.all():
            found = note.evaluate(CONTRASTS)
            assert found
            hidden |= {(name, what): round(contrast, 1) for what, contrast in found if contrast < LEGIBLE}
    page.evaluate(SET, ["Comfy.ColorPalette", "dark"])
    page.evaluate(SET, ["Comfy.VueNodes.Enabled", False])
    assert hidden == {}
