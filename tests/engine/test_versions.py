"""The workers run with the diffusers that this test run is for: the installed one, or the one in WORKERS_DIFFUSERS."""

from __future__ import annotations

import os
from importlib.metadata import distributions, version
from pathlib import Path

import pytest

from tests.engine.conftest import Job, Runner, sigmas
from tests.support.plans import cpu_plan


@pytest.mark.exactness
@pytest.mark.parametrize("workers", [2])
def test_the_workers_have_the_requested_diffusers(run: Runner, models: dict[int, Path], workers: int) -> None:
    folder = os.environ.get("WORKERS_DIFFUSERS")
    expected = version("diffusers")
    if folder:
        (found,) = distributions(name="diffusers", path=[folder])
        expected = found.version
    run(Job(models[4], sigmas(1)), cpu_plan(ulysses=workers))
    assert run.diffusers() == {expected}
