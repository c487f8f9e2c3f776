"""A worker dies or raises: on each rank, in each phase, in each way."""

from __future__ import annotations

import random

import pytest

from parallel_backend.host.workers.causes import WorkerOutOfMemory
from tests.faults.bench import AFTERWARDS, BOUND, DEATHS, ERROR, PHASES, PLANS, Case, deaths
from tests.support.selection import thorough

LOADING, FIRST, LAST, DECODING = "loading the model", "sampling, first step", "sampling, last step", "decoding"
QUICK_EXCEPTIONS = {(2, 1, FIRST), (4, 2, DECODING)}


# the quick run has two workers; test_an_exception_is_named has four
@pytest.mark.parametrize("death", deaths([2]) + deaths([4], quick=[]))
def test_a_death_is_one_clear_error(bench, death):
    bench.assert_dies(death)


# the quick run has two; test_a_death_is_one_clear_error has the words for the other phases
@pytest.mark.parametrize(
    ("workers", "rank", "phase"),
    [
        pytest.param(workers, rank, phase, marks=[thorough] * ((workers, rank, phase) not in QUICK_EXCEPTIONS))
        for workers, rank in ((2, 0), (2, 1), (4, 0), (4, 2), (4, 3))
        for phase in (LOADING, FIRST, LAST, DECODING)
    ],
)
def test_an_exception_is_named_with_rank_phase_and_step(bench, workers, rank, phase):
    case = Case(workers, rank, phase, "raise")
    message, seconds = bench.outcome(case)
    said = f"{case.worker} failed while {case.place}: RuntimeError: a fault was injected. {AFTERWARDS}\n"
    assert message.startswith(said)
    assert "in _raise" in message
    bench.assert_recovered(workers)
    bench.held("an exception", ERROR, seconds, BOUND)


@pytest.mark.parametrize(
    ("phase", "advice"),
    [
        # in the quick run host/test_endings has the first step
        pytest.param(LOADING, "Use weights", marks=thorough),
        pytest.param(LAST, "Use weights", marks=thorough),
        (DECODING, "Set memory_limit"),
    ],
)
def test_out_of_memory_is_the_error_that_comfyui_knows(bench, phase, advice):
    case = Case(2, 1, phase, "oom")
    bench.prepare(case)
    said = rf"^Worker 1 of 2 \(cpu\) ran out of memory while {case.place}: it asked for .*{advice}"
    with pytest.raises(WorkerOutOfMemory, match=said):
        bench.assert_result(case, lambda: False)
    seconds = bench.fault.seconds()
    bench.assert_recovered(2)
    bench.held("out of memory", ERROR, seconds, BOUND)


@thorough
def test_after_each_of_twenty_random_deaths_the_next_run_is_right(bench):
    draw = random.Random(20)
    for _ in range(20):
        workers = draw.choice(list(PLANS))
        case = Case(workers, draw.randrange(workers), draw.choice(list(PHASES)), draw.choice(list(DEATHS)))
        bench.assert_dies(case)
