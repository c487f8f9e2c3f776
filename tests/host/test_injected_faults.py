"""Faults of workers in a real ComfyUI: each ends the prompt in one error or in its cancellation, and the next prompt works."""

from __future__ import annotations

import random
import re
import signal
import time

import pytest

from parallel_backend.worker.process.faults import LATE_SECONDS
from scripts.comfyui import ComfyUI
from tests.faults.bench import AFTERWARDS, BOUND, CANCEL_BOUND, DEATHS, ERROR, PHASES, Case, deaths
from tests.support.faulty import OUT_OF_MEMORY, PATIENCE, FaultyComfyUI, kill, wait_until
from tests.support.graphs.flux import ksampler_graph, parallel
from tests.support.latents import saved_latent
from tests.support.reliability import Ledger
from tests.support.selection import product, thorough

MARGIN = 6
"""Largest number of seconds between the end of patience and the error."""

pytestmark = thorough  # the quick run has test_endings in ComfyUI, and each kind of fault in `faults`

SIGNALS = {signal.SIGKILL: "kill", signal.SIGSEGV: "segv", signal.SIGTERM: "term"}


@pytest.fixture
def server(faulty_comfyui: FaultyComfyUI) -> FaultyComfyUI:
    return faulty_comfyui.started()


def assert_failed(server: FaultyComfyUI, case: Case, said: str) -> float:
    """Check that the fault gives one clear error and leaves nothing, and that the next prompt is right.

    Return the seconds to the error.
    """
    run, seconds = server.strike(case)
    assert run.status == "error"
    assert re.match(said, run.error.exception_message), run.error.exception_message
    assert AFTERWARDS in run.error.exception_message
    server.assert_nothing_left()
    server.assert_right(decoding=case.phase == "decoding")
    return seconds


@pytest.mark.parametrize("death", deaths([2], quick=[]))
def test_a_workers_death_gives_one_error_that_names_it(server, ledger, death):
    seconds = assert_failed(server, death, rf"{re.escape(death.worker)} {DEATHS[death.kind]} while {death.place}\. ")
    ledger.held("ComfyUI", f"a worker {DEATHS[death.kind]}", ERROR, seconds, BOUND)


@pytest.mark.parametrize("case", [Case(2, 0, "sampling, last step", "stop"), Case(2, 1, "decoding", "stop")], ids=str)
def test_the_error_names_a_stopped_worker(server, ledger, case):
    said = rf"{re.escape(case.worker)} has not answered for \d+ s while {case.place}\. "
    seconds = assert_failed(server, case, said)
    patience = PATIENCE["silence"]
    fault = f"a worker is stopped by SIGSTOP (patience {patience} s)"
    ledger.held("ComfyUI", fault, ERROR, seconds, patience + MARGIN)


@pytest.mark.parametrize(
    "case", [Case(2, 1, "sampling, first step", "hang"), Case(2, 0, "loading the model", "hang")], ids=str
)
def test_the_error_names_a_worker_that_joins_no_collective(server, ledger, case):
    waited = re.escape(case.worker.lower())
    said = rf"No worker made progress for \d+ s; the others wait for {waited} while {case.place}\. "
    seconds = assert_failed(server, case, said)
    patience = PATIENCE["stall"]
    fault = f"a worker joins no collective (patience {patience} s)"
    ledger.held("ComfyUI", fault, ERROR, seconds, patience + MARGIN)


def test_a_worker_out_of_memory_gives_one_error_with_comfyuis_advice(server, ledger):
    """The memory runs out while the workers compute; the plan accounts for memory that is taken before."""
    seconds = assert_failed(server, Case(2, 1, "sampling, first step", "oom"), OUT_OF_MEMORY)
    ledger.held("ComfyUI", "out of memory", ERROR, seconds, BOUND)


@pytest.mark.parametrize("phase", PHASES)
def test_cancel_works_in_every_phase_and_twice_in_a_row(server, ledger, phase):
    took = []
    for rank in (0, 1):
        prompt = server.begin(Case(2, rank, phase, "late"))
        wait_until(server.fault.struck, 120)
        server.interrupt()
        run, seconds = server.outcome(prompt)
        assert run.status == "interrupted"
        took.append(seconds)
    server.assert_right(decoding=phase == "decoding")
    for seconds in took:
        ledger.held(
            "ComfyUI", f"Cancel while a worker is held up for {LATE_SECONDS} s", "cancelled", seconds, CANCEL_BOUND
        )


@product(rank=[0, 1], death=[("connecting the workers", "kill"), ("sampling, first step", "exit3")])
def test_cancel_together_with_a_death_ends_the_run_and_the_next_one_works(server, ledger, rank, death):
    phase, kind = death
    prompt = server.begin(Case(2, rank, phase, kind))
    wait_until(server.fault.struck, 120)
    server.interrupt()
    run, seconds = server.outcome(prompt)
    assert run.status == "interrupted" or AFTERWARDS in run.error.exception_message
    server.assert_right()
    ledger.held("ComfyUI", "Cancel together with a death", "cancelled or one error", seconds, BOUND)


def test_each_of_twenty_random_kills_gives_one_error_and_the_next_prompt_works(server, ledger):
    """A signal from outside kills a worker at a random step of a long run, or while the workers start."""
    draw = random.Random(6)
    kill(*server.workers())
    for _ in range(20):
        rank, number, step = draw.randrange(2), draw.choice(list(SIGNALS)), draw.randrange(6)
        if step == 0:
            kill(*server.workers())
        struck: list[float] = []

        def strike(rank: int = rank, number: int = number, struck: list[float] = struck) -> None:
            server.workers()[rank].send_signal(number)
            struck.append(time.monotonic())

        prompt = server.submit(server.long())
        if step == 0:
            wait_until(lambda: len(server.workers()) == 2, 120)
            strike()
        run = server.wait(prompt, on_progress=lambda p, at=step, act=strike: p.value == at and act(), timeout=120)
        seconds = time.monotonic() - struck[0]
        assert run.status == "error"
        said = rf"Worker {rank} of 2 \(cpu\) {DEATHS[SIGNALS[number]]} while .*{AFTERWARDS}"
        assert re.match(said, run.error.exception_message), run.error.exception_message
        server.assert_nothing_left()
        server.assert_right()
        ledger.held("ComfyUI", "a worker is killed at random, twenty times in a row", ERROR, seconds, BOUND)


def test_a_killed_worker_does_not_affect_a_second_comfyui(server: FaultyComfyUI, comfyui: ComfyUI, ledger: Ledger):
    """A worker of the first ComfyUI is killed while both are busy. The second one's picture equals its picture alone."""
    graph = parallel(ksampler_graph("tiny-schnell", width=128, height=128, steps=60, seed=61))
    alone = saved_latent(comfyui, comfyui.queue(graph).check())
    server.with_workers()
    graph["plan"]["inputs"]["warmup_steps"] = 61  # has no effect, but makes this a new job for ComfyUI
    theirs = comfyui.submit(graph)
    run, seconds = server.strike(Case(2, 0, "sampling, first step", "kill"))
    assert run.status == "error"
    assert (saved_latent(comfyui, comfyui.wait(theirs).check()) == alone).all()
    server.assert_nothing_left()
    server.assert_right()
    ledger.held("ComfyUI", "a worker is killed beside another ComfyUI", "one error; the other's result", seconds, BOUND)
