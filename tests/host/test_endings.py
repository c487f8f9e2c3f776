"""Cancel, a worker out of memory and ComfyUI's end, in the ComfyUI of the quick run's other tests."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch import Tensor

from parallel_backend.worker.process.environment import FAULT_FILE
from scripts.comfyui import ComfyUI, ComfyUIError
from tests.support.faulty import OUT_OF_MEMORY, alive, wait_until, workers_among
from tests.support.graphs.flux import Graph, ksampler_graph, parallel, step_by_step
from tests.support.latents import relative_error
from tests.support.server import NARROW

STEP, LATE = 3, 200
"""Step at which a test disturbs a run, and a step before which the run has then ended, also on a busy machine."""

LEAVE_SECONDS = 5
"""Seconds until the workers have ended after ComfyUI ends."""

SHORT = ksampler_graph(NARROW, width=64, height=64, steps=2, cfg=2.0, seed=5100)
LONG = ksampler_graph(NARROW, width=256, height=256, steps=1000, cfg=2.0, seed=5101)


def with_workers(server: ComfyUI) -> list[psutil.Process]:
    """Return two workers, idle and with the model loaded."""
    server.queue(parallel(SHORT), timeout=300).check()
    workers = workers_among(server.children())
    assert len(workers) == 2
    return workers


@pytest.mark.parametrize(
    ("graph", "plan"), [(step_by_step(LONG), {}), (LONG, {"pipefusion": 2})], ids=["step by step", "PipeFusion"]
)
def test_cancel_ends_the_run_and_the_workers_stay(
    comfyui: ComfyUI, latent_of: Callable[[Graph], Tensor], graph: Graph, plan: dict[str, Any]
) -> None:
    before = with_workers(comfyui)
    run = comfyui.queue(
        parallel(graph, **plan), on_progress=lambda step: step.value == STEP and comfyui.interrupt(), timeout=300
    )
    assert run.status == "interrupted"
    assert STEP <= run.progress[-1].value < LATE
    afterwards = parallel(SHORT, **plan, warmup_steps=2)  # all its steps, so that PipeFusion's result is exact
    assert relative_error(latent_of(afterwards), latent_of(SHORT)) <= 1e-5
    assert workers_among(comfyui.children()) == before


def test_a_worker_out_of_memory_gives_one_error_with_comfyuis_advice(comfyui: ComfyUI) -> None:
    """The memory runs out while the workers compute; the plan accounts for memory that is taken before."""
    Path(comfyui.env[FAULT_FILE]).write_text("rank=1,phase=sampling,step=1,kind=oom")
    run = comfyui.queue(parallel(SHORT | {"latent": LONG["latent"]}), timeout=300)
    assert run.error is not None
    assert re.match(OUT_OF_MEMORY, run.error.exception_message), run.error.exception_message
    with_workers(comfyui)


@pytest.fixture
def last(comfyui: ComfyUI, pytestconfig: pytest.Config) -> Iterator[ComfyUI]:
    """Provide the ComfyUI to its last test in the quick run (support/side_by_side.py). Other tests of --all need it again."""
    yield comfyui
    comfyui.stop()
    if pytestconfig.getoption("all"):
        comfyui.start()


def test_when_comfyui_is_killed_its_workers_end(last: ComfyUI) -> None:
    workers = with_workers(last)
    folder = Path(workers[0].cwd())
    assert folder.name.startswith("comfyui-parallel-")
    with pytest.raises(ComfyUIError, match="ended while a graph was running"):
        last.queue(parallel(LONG), on_progress=lambda step: step.value == STEP and last.process.kill(), timeout=300)
    wait_until(lambda: not any(alive(worker) for worker in workers), LEAVE_SECONDS)
    assert not folder.exists()
