"""Workers that do not die but do not answer either: stopped, stuck, late, never there."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

from parallel_backend.errors import WorkerFailed
from parallel_backend.host import Deadlines
from tests.faults.bench import AFTERWARDS, PHASES, Bench, Case

PATIENCE = Deadlines(start=10, silence=5, stall=8, cancel=5)
MARGIN = 6
"""Seconds from the end of patience to the error."""


@pytest.fixture(autouse=True)
def patience(bench: Bench) -> Iterator[None]:
    """Workers of these tests are given up soon."""
    bench.end_workers()
    ordinary, bench.backend.deadlines = bench.backend.deadlines, PATIENCE
    yield
    bench.end_workers()
    bench.backend.deadlines = ordinary


def held(bench: Bench, case: Case, said: str, bound: float) -> None:
    message, seconds = bench.outcome(case)
    assert re.match(said, message), message
    assert AFTERWARDS in message
    assert seconds <= bound
    bench.assert_nothing_left()
    bench.assert_right(case.workers)


@pytest.mark.parametrize(("workers", "rank"), [(2, 0), (2, 1), (4, 3)])
@pytest.mark.parametrize("phase", ["loading the model", "sampling, last step", "decoding"])
def test_a_stopped_worker_is_named(bench, workers, rank, phase):
    case = Case(workers, rank, phase, "stop")
    held(bench, case, rf"{re.escape(case.worker)} has not answered for \d+ s while {case.place}\. ", 5 + MARGIN)


@pytest.mark.parametrize(("workers", "rank"), [(2, 0), (2, 1), (4, 2)])
@pytest.mark.parametrize("phase", ["loading the model", "sampling, last step", "decoding"])
def test_a_worker_that_joins_no_collective_is_named(bench, workers, rank, phase):
    case = Case(workers, rank, phase, "hang")
    said = (
        rf"No worker got anywhere for \d+ s; the others wait for {re.escape(case.worker.lower())} while {case.place}\. "
    )
    held(bench, case, said, 8 + MARGIN)


@pytest.mark.parametrize("kind", ["stop", "hang"])
@pytest.mark.parametrize("phase", list(PHASES)[:3])
def test_a_worker_that_never_starts_is_named(bench, phase, kind):
    case = Case(2, 1, phase, kind)
    held(bench, case, r"Worker 1 \(cpu\)|Worker 0 \(cpu\), 1 \(cpu\)", 10 + MARGIN)


@pytest.mark.parametrize("phase", list(PHASES)[:3])
def test_a_worker_that_starts_late_is_waited_for(bench, phase):
    assert bench.outcome(Case(2, 1, phase, "late"))[0] == ""


def test_a_stopped_worker_that_does_not_read_its_request(bench):
    """The request is too large for the socket's buffer, so that sending waits."""
    bench.decode(2)
    bench.workers()[0].suspend()
    with pytest.raises(WorkerFailed, match=r"Worker 0 of 2 \(cpu\) has not answered for 5 s while (idle|decoding)"):
        bench.decode(2, latent=torch.zeros(1, 16, 512, 512))
    bench.assert_nothing_left()
    bench.assert_right(2)
