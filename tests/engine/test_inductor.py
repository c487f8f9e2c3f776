"""Blocks compiled by inductor in real workers: a second start reuses the cache, and a machine may lack a C++ compiler.

Each test has a cache of its own, which is empty at first. Each result is compared with ComfyUI's; more plans and kinds of file
are in `features/test_inductor`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.conftest import TOLERANCE, Job, Runner, Simulated, sigmas
from tests.support.latents import relative_error
from tests.support.plans import cpu_plan
from tests.support.selection import thorough

STEPS, BLOCKS = 2, 3
PLAN = cpu_plan(ulysses=2, blocks=BLOCKS)
KERNELS = ".so"
"""The ending of a compiled kernel's file name."""

pytestmark = thorough


@pytest.fixture
def cache(run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Provide the folder in which workers keep compiled code. The workers start anew before and after the test."""
    run.end_workers()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    yield tmp_path
    run.end_workers()


@pytest.fixture(scope="module")
def job(models: dict[int, Path]) -> Job:
    return Job(models[4], sigmas(STEPS))


def files(folder: Path) -> set[str]:
    """Return all files in a cache."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def uncompiled(run: Runner) -> tuple[str, ...]:
    """Return the last run's messages about kinds of blocks that are not compiled."""
    assert run.answer is not None
    said: tuple[str, ...] = run.answer.frame.message.uncompiled
    return said


def test_restarted_workers_compile_nothing(run: Runner, job: Job, simulated: Simulated, cache: Path) -> None:
    first = run(job, PLAN, compiler="inductor")
    assert relative_error(first, simulated(job)) <= TOLERANCE
    kept = files(cache)
    assert any(name.startswith("fxgraph") for name in kept)
    assert any(name.endswith(KERNELS) for name in kept)
    run.end_workers()
    assert torch.equal(run(job, PLAN, compiler="inductor"), first)
    assert uncompiled(run) == ()
    assert files(cache) == kept


def test_without_a_compiler_the_blocks_run_uncompiled_and_one_message_says_so(
    run: Runner, job: Job, simulated: Simulated, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert relative_error(run(job, PLAN, compiler="inductor"), simulated(job)) <= TOLERANCE
    double, single = uncompiled(run)
    assert double.startswith("DoubleStreamBlock is not compiled: ")
    assert single.startswith("SingleStreamBlock is not compiled: ")
    run(job, PLAN, compiler="inductor")
    assert uncompiled(run) == ()
    assert not any(name.endswith(KERNELS) for name in files(cache))
