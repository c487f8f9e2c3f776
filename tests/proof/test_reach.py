"""The page has the code that the proofs of ComfyUI's classes reach."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel_backend.models.comfyui.small.kinds import KINDS, all_cases
from tests.proof.reach import heading, reach_of, row, section
from tests.support.comfyuis import is_listed, only_in_newer
from tests.support.selection import thorough

PAGE = Path(__file__).parents[2] / "docs" / "measured" / "proof-reach.md"


@pytest.fixture(scope="module")
def recorded() -> list[str]:
    """Return the lines of this ComfyUI's section; the section of the pages' ComfyUI may not be missing."""
    parts = PAGE.read_text("utf-8").split(f"{heading()}\n\n")
    only_in_newer(f"section in {PAGE.name}", is_listed() or len(parts) > 1)
    return parts[1].partition("\n\n## ")[0].strip().splitlines()


@pytest.mark.parametrize("kind", ["WAN21_T2V", "MiniMaxH3"])
def test_the_page_equals_the_measured_reach(kind: str, recorded: list[str]) -> None:
    assert row(kind, reach_of(kind, all_cases(kind))) in recorded


@thorough
def test_the_page_equals_the_measured_reach_of_all_classes(recorded: list[str]) -> None:
    assert [*section(tuple(KINDS))] == recorded
