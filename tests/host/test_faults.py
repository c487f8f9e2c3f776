"""Every request ends, whatever ends it: Cancel, a killed worker, a killed ComfyUI; and the next prompt works."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from parallel_backend.errors import WorkerFailed
from parallel_backend.host import Backend, Deadlines
from parallel_backend.models.family import ModelSpec
from scripts.comfyui import ComfyUI, ComfyUIError, Progress, Run
from tests.host.conftest import fill, relative_error, saved_latent
from tests.host.graphs import Graph, ksampler_graph, parallel
from tests.plans import cpu_plan
from tests.tiny_flux import CHANNELS, POOLED_WIDTH, TEXT_WIDTH, save_flux

SEEDS = itertools.count(3300)
STEP = 5
"""The step of a long run at which something happens to it."""

KILLED = r"was killed by SIGKILL while"
AFTERWARDS = (
    r"\. (The system does that when the machine's memory is full: close other programs or use fewer workers\. )?"
    r"The workers were stopped; queue the prompt again and they start afresh\.(\nThe last lines of its log:\n[\s\S]+)?"
)


def short() -> Graph:
    """A job of a moment, with a seed of its own so that ComfyUI has no result of it."""
    return ksampler_graph("tiny-schnell", width=64, height=64, steps=2, cfg=2.0, seed=next(SEEDS))


def long(sampler: str = "euler", **plan: Any) -> Graph:
    """A job of minutes in steps of a fraction of a second."""
    graph = ksampler_graph("tiny-schnell", width=256, height=256, steps=1000, sampler=sampler, seed=next(SEEDS))
    return parallel(graph, **plan)


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyUI]:
    """A ComfyUI of this module's own with a temporary folder of its own; not started."""
    base_dir = tmp_path_factory.mktemp("faults")
    temporary = base_dir / "temporary"
    temporary.mkdir()
    server = ComfyUI(os.environ["COMFYUI_PATH"], base_dir, env={"TMPDIR": str(temporary)})
    fill(server)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a child of a background job would ignore it
    with server:
        yield server
    signal.signal(signal.SIGINT, handler)


@pytest.fixture
def server(own_server: ComfyUI) -> ComfyUI:
    """The server, started again where a test has ended it."""
    if own_server.process.poll() is not None:
        own_server.stop()
        own_server.start()
    return own_server


def workers(server: ComfyUI) -> list[psutil.Process]:
    """The server's live workers by rank."""
    return workers_among(server.children())


def workers_among(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Workers are named parallel-rankN."""
    ranks = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.name().startswith("parallel-rank"):
                ranks[int(process.name().removeprefix("parallel-rank"))] = process
    return [ranks[rank] for rank in sorted(ranks)]


def run_directories(server: ComfyUI) -> list[Path]:
    """What the pack has in the temporary folder."""
    return list(Path(server.env["TMPDIR"]).glob("comfyui-parallel-*"))


def wait_until(condition: Callable[[], Any], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


def kill(*processes: psutil.Process) -> None:
    """Kill processes and wait until the kernel has ended them; their parent may not have noticed yet."""
    for process in processes:
        process.kill()
    wait_until(lambda: not any(alive(process) for process in processes), 10)


def alive(process: psutil.Process) -> bool:
    try:
        threads = os.listdir(f"/proc/{process.pid}/task")  # the kernel ends them one by one, the first being no sign
        return bool(process.status() != psutil.STATUS_ZOMBIE) or len(threads) > 1
    except (psutil.NoSuchProcess, FileNotFoundError):
        return False


def assert_right(server: ComfyUI) -> None:
    """An ordinary prompt gives the right latent."""
    graph = short()
    expected = saved_latent(server, server.queue(graph).check())
    run = server.queue(parallel(graph), timeout=300).check()
    assert relative_error(saved_latent(server, run), expected) <= 1e-5


def with_workers(server: ComfyUI) -> list[psutil.Process]:
    """The workers, started if there are none, idle and with the model loaded."""
    assert_right(server)
    return workers(server)


class Disturbed:
    """A long run to which something happens at a step; `seconds` is how long it then took to end."""

    def __init__(self, server: ComfyUI, graph: Graph, disturb: Callable[[], None]) -> None:
        happened: list[float] = []

        def at_step(progress: Progress) -> None:
            if progress.value == STEP:
                disturb()
                happened.append(time.perf_counter())

        self.run: Run = server.wait(server.submit(graph), on_progress=at_step, timeout=300)
        self.seconds = time.perf_counter() - happened[0]
        times = [progress.time for progress in self.run.progress[: STEP + 1]]
        self.step_seconds = statistics.median(after - before for before, after in itertools.pairwise(times))


# -- Cancel


@pytest.mark.parametrize(
    "settings",
    [{}, {"sampler": "dpm_2"}, {"sampler": "lms"}, {"pipefusion": 2}],
    ids=["one call a step", "two calls a step", "step by step", "PipeFusion"],
)
def test_cancel_ends_the_run_within_about_a_step_and_the_workers_stay(server, settings):
    before = with_workers(server)
    cancelled = Disturbed(server, long(**settings), server.interrupt)
    assert cancelled.run.status == "interrupted"
    assert cancelled.seconds <= 1 + 3 * cancelled.step_seconds
    assert workers(server) == before
    assert_right(server)
    assert workers(server) == before


def test_cancel_while_the_workers_start_ends_them(server):
    kill(*workers(server))
    prompt = server.submit(parallel(short()))
    wait_until(lambda: len(workers(server)) == 2, 60)
    pressed = time.monotonic()
    server.interrupt()
    assert server.wait(prompt).status == "interrupted"
    assert time.monotonic() - pressed <= 3
    assert not workers(server)
    assert not run_directories(server)
    assert_right(server)


# -- killed workers


@pytest.mark.parametrize(
    ("rank", "plan"),
    [(0, {"ulysses": 2}), (1, {"ulysses": 2}), (0, {"pipefusion": 2})],
    ids=["the first", "the second", "the first stage"],
)
def test_a_worker_killed_in_the_middle_is_one_clear_error_and_leaves_nothing(server, rank, plan):
    before = with_workers(server)
    killed = Disturbed(server, long(**plan), before[rank].kill)
    assert killed.run.status == "error"
    assert killed.seconds <= 5
    message = killed.run.error.exception_message
    assert re.fullmatch(rf"Worker {rank} of 2 \(cpu\) {KILLED} sampling, step \d+{AFTERWARDS}", message)
    assert not any(alive(worker) for worker in before)
    assert not workers(server)
    assert not run_directories(server)
    assert_right(server)


def test_a_worker_killed_while_starting_is_one_clear_error_and_leaves_nothing(server):
    kill(*workers(server))
    prompt = server.submit(parallel(short()))
    wait_until(lambda: len(workers(server)) == 2, 60)
    workers(server)[1].kill()
    killed_at = time.monotonic()
    run = server.wait(prompt)
    assert time.monotonic() - killed_at <= 5
    assert run.status == "error"
    assert re.fullmatch(rf"Worker 1 of 2 \(cpu\) {KILLED} [a-z ]+{AFTERWARDS}", run.error.exception_message)
    assert not workers(server)
    assert not run_directories(server)
    assert_right(server)


@pytest.mark.parametrize("rank", [0, 1])
def test_after_a_worker_was_killed_while_idle_the_next_prompt_just_works(server, rank):
    before = with_workers(server)
    kill(before[rank])
    assert_right(server)
    assert len(workers(server)) == 2
    assert not set(before) & set(workers(server))
    assert len(run_directories(server)) == 1


def test_a_worker_that_hangs_is_one_clear_error_and_leaves_nothing(tmp_path, monkeypatch):
    """With the Backend alone, whose patience can be set; in ComfyUI it is 30 s."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    file = save_flux(tmp_path / "tiny.safetensors")
    model = ModelSpec("flux", str(file), modified=0, size=0, dtype="float32")
    tensors = {
        "x": torch.zeros(1, CHANNELS, 8, 8),
        "timestep": torch.ones(1),
        "context": torch.zeros(1, 5, TEXT_WIDTH),
        "y": torch.zeros(1, POOLED_WIDTH),
    }
    backend = Backend(Deadlines(silence=10))
    try:
        backend.forward(model, cpu_plan(ulysses=2), "float32", [tensors], lambda *_: None, lambda: False)
        (fork_server,) = [child for child in psutil.Process().children() if "forkserver" in " ".join(child.cmdline())]
        before = workers_among(fork_server.children())
        before[1].send_signal(signal.SIGSTOP)
        with pytest.raises(WorkerFailed, match=rf"of 2 \(cpu\) has not answered for 1\d s while [a-z ]+{AFTERWARDS}$"):
            backend.forward(model, cpu_plan(ulysses=2), "float32", [tensors], lambda *_: None, lambda: False)
        assert not any(alive(worker) for worker in before)
        assert not list(tmp_path.glob("comfyui-parallel-*"))
    finally:
        backend.close()


# -- a killed ComfyUI


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "Ctrl-C"])
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "in the middle"])
def test_when_comfyui_ends_its_workers_end(server, number, busy):
    before = with_workers(server)
    assert len(before) == 2
    if busy:
        with pytest.raises(ComfyUIError, match="ended while a graph was running"):
            Disturbed(server, long(), lambda: server.process.send_signal(number))
    else:
        server.process.send_signal(number)
    wait_until(lambda: server.process.poll() is not None, 10)
    wait_until(lambda: not any(alive(worker) for worker in before), 5)
    assert not run_directories(server)
