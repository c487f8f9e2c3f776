"""The page of published times shows the command's current predictions."""

from __future__ import annotations

from pathlib import Path

from benchmarks.published_rows import ROWS, least, lines, predicted

PAGE = Path(__file__).parents[2] / "docs" / "measured" / "published-rows.md"


def test_the_page_of_published_times_is_up_to_date() -> None:
    found = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert len(ROWS) > 10 and len(found) > len(ROWS)
    assert found == lines()


def test_no_prediction_is_below_what_the_hardware_allows() -> None:
    for row in ROWS:
        _, seconds, compiled, parts = predicted(row)
        assert least(row) < parts["matmul"] + parts["attention"] < seconds
        assert least(row) < compiled <= seconds
