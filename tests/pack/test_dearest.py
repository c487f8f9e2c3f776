"""The page of the dearest tests counts every phase of a test, and puts the dearest first."""

from __future__ import annotations

import pytest

from tests import dearest


def report(test: str, when: str, seconds: float) -> pytest.TestReport:
    return pytest.TestReport(test, ("", 0, ""), {}, "passed", None, when, duration=seconds)  # type: ignore[arg-type]


def test_the_page_counts_every_phase_and_begins_with_the_dearest() -> None:
    cheap, dear = "tests/comm/test_mesh.py::test_a", "tests/engine/test_products.py::test_b"
    reports = [
        report(cheap, "call", 1.0),
        report(dear, "setup", 2.0),
        report(dear, "call", 0.5),
        report(dear, "teardown", 0.5),
    ]
    durations = dearest.durations_of(reports)
    assert durations == {cheap: 1.0, dear: 3.0}
    lines = dearest.page(durations).splitlines()
    assert lines[0] == "2 tests took 4 s together."
    assert "| tests/engine/test_products.py | 1 | 3.0 | 75.0 % |" in lines
    assert lines.index("| tests/engine | 1 | 3.0 | 75.0 % |") < lines.index("| tests/comm | 1 | 1.0 | 25.0 % |")
