"""A worker dies or raises: on each rank, in each phase. `python -m benchmarks.faults` runs all ways of each death."""

from __future__ import annotations

import random

import pytest

from parallel_backend.errors import WorkerOutOfMemory
from tests.faults.bench import AFTERWARDS, BOUND, DEATHS, PHASES, PLANS, Case, all_deaths

KINDS = list(DEATHS)
ONE_OF_EACH = [
    case for index, case in enumerate(all_deaths()) if index // len(KINDS) % len(KINDS) == index % len(KINDS)
]
"""Each rank in each phase once, the ways of dying taking turns."""

LOADING, FIRST, LAST, DECODING = "loading the model", "sampling, first step", "sampling, last step", "decoding"


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
def test_a_death_is_one_clear_error(bench, case):
    bench.assert_dies(case)


@pytest.mark.parametrize("phase", [LOADING, FIRST, LAST, DECODING])
@pytest.mark.parametrize(("workers", "rank"), [(2, 0), (2, 1), (4, 0), (4, 2), (4, 3)])
def test_an_exception_is_named_with_rank_phase_and_step(bench, workers, rank, phase):
    case = Case(workers, rank, phase, "raise")
    message, seconds = bench.outcome(case)
    said = f"{case.worker} failed while {case.place}: RuntimeError: a fault was injected. {AFTERWARDS}\n"
    assert message.startswith(said)
    assert "in _raise" in message
    assert seconds <= BOUND
    bench.assert_nothing_left()
    bench.assert_right(workers)


@pytest.mark.parametrize(
    ("phase", "advice"),
    [
        (LOADING, "Use weights"),
        (LAST, "Use weights"),
        (DECODING, "Set memory_limit"),
    ],
)
def test_out_of_memory_is_what_comfyui_knows_as_such(bench, phase, advice):
    case = Case(2, 1, phase, "oom")
    bench.prepare(case)
    with pytest.raises(
        WorkerOutOfMemory, match=rf"^Worker 1 of 2 \(cpu\) ran out of memory while .*: it asked for .*{advice}"
    ):
        bench.assert_result(case, lambda: False)
    bench.assert_nothing_left()
    bench.assert_right(2)


def test_twenty_random_deaths_in_a_row(bench):
    draw = random.Random(20)
    for _ in range(20):
        workers = draw.choice(list(PLANS))
        case = Case(workers, draw.randrange(workers), draw.choice(list(PHASES)), draw.choice(KINDS))
        bench.assert_dies(case)
