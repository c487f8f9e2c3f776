"""Cancel in every phase, twice in a row, and together with a death."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from parallel_backend.worker.process.faults import LATE_SECONDS
from tests.faults.bench import AFTERWARDS, BOUND, CANCEL_BOUND, DEATHS, PHASES, PLANS, Bench, Case
from tests.support.selection import thorough

PATIENCE = 3
QUICK_PHASES = {("joining the other workers", 2), ("loading the model", 2)}
QUICK_DEATHS = {("joining the other workers", "kill"), ("sampling, first step", "term")}
"""Cases of the quick run, which has each kind of death in test_deaths."""


def once_struck(bench: Bench, seconds: float = 0.3) -> Callable[[], bool]:
    """Return a function that presses Cancel a moment after the fault has struck."""
    at: list[float] = []

    def is_cancelled() -> bool:
        if not at and bench.fault.struck():
            at.append(time.monotonic())
        return bool(at) and time.monotonic() - at[0] >= seconds

    return is_cancelled


# the quick run joins and loads here, samples in host/test_endings and page/test_progress, and decodes in features/test_vae
@pytest.mark.parametrize(
    ("phase", "workers"),
    [
        pytest.param(phase, workers, marks=[thorough] * ((phase, workers) not in QUICK_PHASES))
        for phase in PHASES
        for workers in PLANS
    ],
)
def test_cancel_in_every_phase_and_twice_in_a_row_leaves_the_next_run_right(bench, workers, phase):
    took = []
    for rank in (0, workers - 1):
        case = Case(workers, rank, phase, "late")
        ended, seconds = bench.outcome(case, once_struck(bench))
        assert ended in ("cancelled", "") if phase in ("sampling, last step", "decoding") else ended == "cancelled"
        took.append(seconds)
    bench.assert_right(workers)
    for seconds in took:
        bench.held(f"Cancel while a worker is held up for {LATE_SECONDS} s", "cancelled", seconds, CANCEL_BOUND)


@pytest.mark.parametrize(
    ("phase", "kind"),
    [
        pytest.param(phase, kind, marks=[thorough] * ((phase, kind) not in QUICK_DEATHS))
        for phase in ("joining the other workers", "loading the model", "sampling, first step")
        for kind in DEATHS
    ],
)
def test_cancel_together_with_a_death_leaves_the_next_run_right(bench, phase, kind):
    case = Case(2, 1, phase, kind)
    ended, seconds = bench.outcome(case, once_struck(bench, 0))
    assert ended == "cancelled" or AFTERWARDS in ended
    bench.assert_right(2)
    bench.held("Cancel together with a death", "cancelled or one error", seconds, BOUND)


def test_cancel_of_a_run_whose_worker_hangs_ends_the_workers(bench):
    bench.end_workers()
    ordinary = bench.backend.deadlines
    bench.backend.deadlines = type(ordinary)(cancel=PATIENCE)
    try:
        ended, seconds = bench.outcome(Case(2, 1, "sampling, first step", "hang"), once_struck(bench))
    finally:
        bench.backend.deadlines = ordinary
    assert ended == "cancelled"
    bench.assert_recovered(2)
    bench.held(f"Cancel while a worker hangs (patience {PATIENCE} s)", "cancelled", seconds, PATIENCE + 5)
