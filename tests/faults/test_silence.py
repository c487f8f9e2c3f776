"""Workers that do not die and do not answer: stopped, stuck, late, or never started."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator

import pytest
import torch

from parallel_backend.errors import WorkerFailed
from parallel_backend.host import Deadlines
from tests.faults.bench import AFTERWARDS, BOUND, ERROR, PHASES, Bench, Case
from tests.support.selection import thorough

PATIENCE = Deadlines(start=10, silence=5, stall=8, cancel=5)
MARGIN = 6
"""Seconds from the end of patience to the error."""

PLACES = [
    (2, 0, "loading the model"),
    (2, 1, "sampling, last step"),
    (2, 0, "decoding"),
    (4, 3, "loading the model"),
    (4, 1, "sampling, last step"),
]
BEFORE_JOINING = list(PHASES)[:2]


@pytest.fixture(autouse=True)
def patience(bench: Bench) -> Iterator[None]:
    """Give up workers soon in these tests."""
    bench.end_workers()
    ordinary, bench.backend.deadlines = bench.backend.deadlines, PATIENCE
    yield
    bench.end_workers()
    bench.backend.deadlines = ordinary


def held(bench: Bench, case: Case, said: str, fault: str, patience: float) -> None:
    message, seconds = bench.outcome(case)
    assert re.match(said, message), message
    assert AFTERWARDS in message
    bench.assert_recovered(case.workers)
    bench.held(f"{fault} (patience {patience:g} s)", ERROR, seconds, patience + MARGIN)


SILENT = {
    "stop": (
        r"{worker} has not answered for \d+ s while {place}\. ",
        "a worker is stopped by SIGSTOP",
        PATIENCE.silence,
    ),
    "hang": (
        r"No worker made progress for \d+ s; the others wait for {waited} while {place}\. ",
        "a worker joins no collective",
        PATIENCE.stall,
    ),
}


# the quick run has a worker that hangs, and a stopped one in test_a_stopped_worker_that_does_not_read_its_request_is_named
@pytest.mark.parametrize(
    ("kind", "place"),
    [
        pytest.param(kind, place, id=f"{kind}-{place}", marks=[thorough] * ((kind, place) != ("hang", PLACES[0])))
        for kind in SILENT
        for place in PLACES
    ],
)
def test_a_silent_worker_is_named(bench, kind, place):
    case = Case(*place, kind)
    said, fault, patience = SILENT[kind]
    names = {"worker": case.worker, "waited": case.worker.lower(), "place": case.place}
    said = said.format(**{key: re.escape(name) for key, name in names.items()})
    held(bench, case, said, fault, patience)


@pytest.mark.parametrize(
    ("phase", "kind"),
    [
        pytest.param(phase, kind, marks=[thorough] * (kind == "stop"))
        for phase, kind in zip(BEFORE_JOINING, ("stop", "hang"), strict=True)
    ],
)
def test_a_worker_that_never_starts_is_named(bench, phase, kind):
    case = Case(2, 1, phase, kind)
    said = r"Worker 1 \(cpu\)|Worker 0 \(cpu\), 1 \(cpu\)"
    held(bench, case, said, "a worker never starts", PATIENCE.start)


@pytest.mark.parametrize(
    "phase", [BEFORE_JOINING[0], *(pytest.param(phase, marks=thorough) for phase in BEFORE_JOINING[1:])]
)
def test_a_worker_that_starts_late_is_waited_for(bench, phase):
    message, seconds = bench.outcome(Case(2, 1, phase, "late"))
    assert not message
    bench.held("a worker starts late", "the result", seconds, BOUND)


def test_a_stopped_worker_that_does_not_read_its_request_is_named(bench):
    """The request is larger than the socket's buffer, so that sending waits."""
    bench.decode(2)
    bench.workers()[0].suspend()
    started = time.monotonic()
    said = r"Worker 0 of 2 \(cpu\) has not answered for 5 s while (idle|decoding, step \d+)\. "
    with pytest.raises(WorkerFailed, match=said):
        bench.decode(2, latent=torch.zeros(1, 16, 1, 512, 512))
    seconds = time.monotonic() - started
    bench.assert_recovered(2)
    bench.held(f"a stopped worker reads no request (patience {PATIENCE.silence:g} s)", ERROR, seconds, 5 + MARGIN)


def test_a_paused_host_blames_no_worker(bench):
    """The workers finish their work during the pause, and no one reads their heartbeats."""
    bench.backend.deadlines = Deadlines(silence=2, stall=3)
    case = Case(2, 0, "sampling, last step", "late")
    bench.prepare(case)
    paused: list[float] = []

    def pause() -> None:
        if not paused:
            paused.append(time.monotonic())
            subprocess.Popen(["sh", "-c", 'sleep 0.2; kill -STOP "$0"; sleep 4; kill -CONT "$0"', str(os.getpid())])

    assert torch.equal(bench.run(bench.job, case.plan, on_step=pause), bench.right(2))
    seconds = time.monotonic() - paused[0]
    assert seconds > 4
    bench.held("the host is paused for 4 s (patience 2 s)", "the result", seconds, 4 + BOUND)


@thorough
def test_silence_is_allowed_longer_while_connections_are_opened(bench):
    """NCCL may stop Python from running meanwhile."""
    bench.backend.deadlines = Deadlines(start=30, silence=3, stall=60)
    message, _ = bench.outcome(Case(2, 1, "connecting the workers", "stop"))
    said = re.match(r"Worker 1 of 2 \(cpu\) has not answered for (\d+) s while connecting the workers\. ", message)
    assert said is not None, message
    assert int(said[1]) >= 9
