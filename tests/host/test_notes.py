"""The templates' notes can be read in the page, as it draws them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.host.contrasts import CONTRASTS, LEGIBLE
from tests.host.test_frontend import SET, TEMPLATES, open_graph, page, renderer, template  # noqa: F401  (fixtures)
from tests.selection import thorough

NOTES = ".comfy-markdown, .comfy-markdown-content"
"""What the page shows a note's text in, on the old canvas and in Nodes 2.0."""


def notes_of(name: str) -> list[dict[str, Any]]:
    """The notes that one sees when a template opens."""
    return [each for each in template(name)["nodes"] if each["type"] == "MarkdownNote"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_note_has_the_pages_own_colours_and_no_code_within_a_line(name: str) -> None:
    """Which Nodes 2.0 draws blue on brown, whatever the theme."""
    for note in notes_of(name):
        assert not {"color", "bgcolor"} & note.keys()
        (text,) = note["widgets_values"]
        assert "`" not in re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


@thorough
@pytest.mark.usefixtures("renderer")
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_note_can_be_read(page: Page, theme: str) -> None:  # noqa: F811
    page.evaluate(SET, ["Comfy.ColorPalette", theme])
    hidden = {}
    for name in TEMPLATES:
        open_graph(page, name)
        notes = page.locator(NOTES).filter(visible=True)  # those inside of subgraphs are there as well
        expect(notes).to_have_count(len(notes_of(name)))
        for note in notes.all():
            found = note.evaluate(CONTRASTS)
            assert found
            hidden |= {(name, what): round(contrast, 1) for what, contrast in found if contrast < LEGIBLE}
    page.evaluate(SET, ["Comfy.ColorPalette", "dark"])
    assert hidden == {}
