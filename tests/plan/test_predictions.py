"""The cost model beside published measurements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from benchmarks import compared as comparison
from benchmarks.compared import OURS, compared, errors, fit, median, spread
from benchmarks.predictions import PAGE, page
from benchmarks.published import published
from parallel_backend.plan.predict.cards import cards
from parallel_backend.plan.predict.certainty import ERRORS, kind_of, likely
from parallel_backend.plan.predict.known_machines import LINKS
from parallel_backend.plan.predict.profiles import REACHED, Profile


def test_the_page_of_predictions_is_up_to_date() -> None:
    assert page() == PAGE.read_text(encoding="utf-8"), "run python -m benchmarks.predictions"


def test_constants_are_fitted_on_less_than_half_of_the_rows_and_each_row_has_its_source() -> None:
    data = published()
    rows = data.rows
    assert len(rows) >= 400 and len({row.card for row in rows}) >= 15
    assert 0.2 < sum(row.fitted for row in rows) / len(rows) <= 0.5
    assert all(row.source for row in rows) and all(out.source and out.reason for out in data.left_out)
    assert sum(out.rows for out in data.left_out) > 300


def test_rows_that_were_not_fitted_meet_the_aims() -> None:
    seconds, gains = errors(fitted=False, gains=False), errors(fitted=False, gains=True)
    assert len(seconds) >= 100 and len(gains) >= 40
    assert median(seconds) < 0.15 and median(gains) < 0.10


@pytest.fixture
def twice_as_fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Double the speed of every card's matmuls and attention."""
    machine_of = comparison.machine_of

    def faster(*arguments: object) -> Profile:
        machine = machine_of(*arguments)  # type: ignore[arg-type]
        return replace(machine, device=replace(machine.device, reached=2 * machine.device.reached))

    monkeypatch.setattr(comparison, "machine_of", faster)
    compared.cache_clear()
    yield
    compared.cache_clear()


@pytest.mark.usefixtures("twice_as_fast")
def test_the_aims_are_missed_with_cards_twice_as_fast() -> None:
    assert median(errors(fitted=False, gains=False)) > 0.15


def test_each_prediction_that_is_far_off_says_why() -> None:
    """A prediction is far off from a relative error of 0.4 on."""
    far = [entry for entry in compared() if max(abs(entry.error or 0), abs(entry.gain_error or 0)) > 0.4]
    assert far and all(entry.row.why for entry in far)
    assert [entry.row for entry in compared() if entry.row.why] == [entry.row for entry in far]


def test_the_range_of_a_prediction_is_that_of_comfyuis_rows() -> None:
    for kind, error in ERRORS.items():
        assert error == pytest.approx(spread(kind), abs=0.006), kind
        rows = [each for each in compared() if each.row.stack == OURS and kind_of(each.row.dtype) == kind]
        ranges = [(each.row.seconds, *likely(each.seconds, each.row.dtype)) for each in rows if not each.row.fitted]
        inside = sum(least <= seconds <= most for seconds, least, most in ranges)
        assert 0.78 <= inside / len(ranges) <= 0.85, kind
    assert likely(10.0, "bf16") == pytest.approx((10 / 1.29, 12.9)) and likely(10.0, "q4_k")[1] == 13.3


def test_the_fit_gives_the_constants_in_use() -> None:
    found = dict(fit())
    assert len(found) == 3
    limited, reached, bandwidth = found.values()
    assert cards()["h100"].reached == pytest.approx(limited, abs=0.01)
    assert pytest.approx(reached, abs=0.015) == REACHED
    assert LINKS["pcie 4"][0].bandwidth == pytest.approx(1e9 * bandwidth, rel=0.2)
