"""Cancel in a long run, workers that were killed while idle, and ComfyUI's own end, in several ways."""

from __future__ import annotations

import itertools
import signal
import statistics
import subprocess
import time
from collections.abc import Callable

import pytest

from scripts.comfyui import ComfyUIError, QueuedRun, StepProgress
from tests.faults.bench import BOUND
from tests.support.faulty import FaultyComfyUI, alive, kill, wait_until
from tests.support.graphs.flux import Graph
from tests.support.reliability import Ledger
from tests.support.selection import thorough

# the quick run has test_endings in ComfyUI; it kills idle workers in faults/test_machine, by Bench.end_workers
pytestmark = thorough

STEP = 3
"""Step of a long run at which a test disturbs it."""

LEAVE_SECONDS = 5
"""Seconds until the workers have ended after ComfyUI ends."""

ENDS = {
    "SIGKILL": signal.SIGKILL,
    "Ctrl-C": signal.SIGINT,
    "an uncaught exception": signal.SIGUSR1,
}
"""Ways in which ComfyUI ends, and the signal that causes each (tests/support/faulty.py)."""


@pytest.fixture
def server(faulty_comfyui: FaultyComfyUI) -> FaultyComfyUI:
    return faulty_comfyui.started()


def disturbed(server: FaultyComfyUI, graph: Graph, disturb: Callable[[], None]) -> tuple[QueuedRun, float]:
    """Disturb a run at a step. Return the ended run, and the seconds that it took from there on."""
    happened: list[float] = []

    def at_step(progress: StepProgress) -> None:
        if progress.value == STEP:
            disturb()
            happened.append(time.perf_counter())

    run = server.wait(server.submit(graph), on_progress=at_step, timeout=300)
    return run, time.perf_counter() - happened[0]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="one call a step"),
        pytest.param({"sampler": "dpm_2"}, id="two calls a step"),
        pytest.param({"sampler": "euler_cfg_pp"}, id="both sides at each call"),
        pytest.param({"stepwise": True}, id="step by step"),
        pytest.param({"pipefusion": 2}, id="PipeFusion"),
    ],
)
def test_cancel_ends_the_run_within_about_a_step_and_the_workers_stay(server, settings):
    before = server.with_workers()
    run, seconds = disturbed(server, server.long(**settings), server.interrupt)
    assert run.status == "interrupted"
    times = [progress.time for progress in run.progress[: STEP + 1]]
    soon = 1 + 3 * statistics.median(after - before for before, after in itertools.pairwise(times))
    assert seconds <= soon or run.progress[-1].value - STEP <= 3  # a busy machine takes longer, but not more steps
    assert seconds <= soon + BOUND
    assert server.workers() == before
    server.assert_right()
    assert server.workers() == before


@pytest.mark.parametrize("rank", [0, 1])
def test_after_an_idle_worker_was_killed_the_next_prompt_works(server, rank):
    before = server.with_workers()
    kill(before[rank])
    server.assert_right()
    assert len(server.workers()) == 2
    assert not set(before) & set(server.workers())
    assert len(server.folders()) == 1


@pytest.mark.parametrize(
    ("busy", "how"),
    [
        pytest.param(busy, how, id=f"{name}-{how}")
        for name, busy in {"idle": False, "in the middle": True}.items()
        for how in ENDS
    ],
)
def test_when_comfyui_ends_its_workers_end(server: FaultyComfyUI, ledger: Ledger, how: str, busy: bool):
    before = server.with_workers()
    assert len(before) == 2

    def end() -> None:
        """Send the signal until ComfyUI ends, because asyncio catches the exception while it runs a callback."""
        for _ in range(20):
            server.process.send_signal(ENDS[how])
            try:
                server.process.wait(1 if how == "an uncaught exception" else 10)
                return
            except subprocess.TimeoutExpired:
                pass

    if busy:
        with pytest.raises(ComfyUIError, match="ended while a graph was running"):
            disturbed(server, server.long(), end)
    else:
        end()
    assert server.process.poll() is not None
    ended = time.monotonic()
    wait_until(lambda: not any(alive(worker) for worker in before), LEAVE_SECONDS)
    seconds = time.monotonic() - ended
    if how == "an uncaught exception":
        assert "RuntimeError: an uncaught exception" in server.log
    assert not server.folders()
    ledger.held("ComfyUI", f"ComfyUI ends by {how}", "nothing is left", seconds, LEAVE_SECONDS)
