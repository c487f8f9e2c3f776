"""The automatic plan on real workers: measured once, ranked, explained, and refused with the numbers if memory is short."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest
import torch

from parallel_backend.conditioning import Conditioning
from parallel_backend.diffusion import ModelSpec
from parallel_backend.errors import Refused
from parallel_backend.host import backend as host_backend
from parallel_backend.host.planning.planner import PlanRequest
from parallel_backend.models.families import FAMILIES
from parallel_backend.plan import ParallelPlan, ResolvedPlan, Workload
from parallel_backend.plan.predict.measure import Machine
from parallel_backend.plan.predict.profiles import DenoiseJob
from parallel_backend.weights.files.checkpoint import read_header
from tests.engine.conftest import TOLERANCE, Runner, sigmas
from tests.engine.conftest import Job as Denoise
from tests.support.comfy_oracle import comfy_on_path
from tests.support.latents import relative_error
from tests.support.tiny.flux import POOLED_WIDTH, TEXT_WIDTH

FLUX = FAMILIES["comfyui"]
WORKERS_OF_ALL_TESTS = 2

comfy_on_path()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "comfyui-parallel"


def question(
    path: Path, tokens: int = 64, text: int = 21, has_uncond: bool = True, **requested_plan: object
) -> PlanRequest:
    _, config = FLUX.inspect(read_header(path))
    shape = FLUX.shape(config)
    status = path.stat()
    spec = ModelSpec("comfyui", str(path), status.st_mtime_ns, status.st_size, "float32")
    job = DenoiseJob(tokens, text, has_uncond=has_uncond, element=4, weight_element=4)
    return PlanRequest(ParallelPlan(**requested_plan), 0, spec, shape, Workload(1, has_uncond, 8), job)  # type: ignore[arg-type]


def choose(run: Runner, asked: PlanRequest) -> ResolvedPlan:
    example = {
        "x": torch.zeros(1, 16, 16, 16),
        "timestep": torch.ones(1),
        "context": torch.zeros(1, 21, TEXT_WIDTH),
        "y": torch.zeros(1, POOLED_WIDTH),
    }
    return run.backend.plan(asked, "float32", Conditioning(example), lambda device: 0, lambda: False)


def test_this_machine_is_measured_once_and_the_plan_logged_without_times(run, models, cache, caplog) -> None:
    caplog.set_level(logging.INFO)
    asked = question(models[4], devices="cpu:2")
    plan = choose(run, asked)
    (kept,) = cache.glob("machine-*.json")
    measured = kept.read_bytes()
    assert plan.world_size == 2
    (line,) = [line for line in caplog.messages if "chosen" in line]
    assert line == f"Parallel: {plan.describe()}, chosen for the CPU, whose times are not predicted"
    caplog.clear()
    assert choose(run, asked) == plan
    assert not caplog.text
    other = question(models[4], tokens=2048, devices="cpu:2")
    choose(run, other)
    assert kept.read_bytes() == measured and "chosen" in caplog.text
    choose(run, question(models[4], devices="cpu:2", attention="sdpa"))
    assert len([*cache.glob("machine-*.json")]) == 2  # a second file, for the requested kernel


def test_stages_are_cut_by_measured_block_times(run, models, cache) -> None:
    plan = choose(run, question(models[4], devices="cpu:2", pipefusion=2))
    (kept,) = cache.glob("blocktimes-*.json")
    assert b'"counts":[1,2]' in kept.read_bytes()
    assert plan.pipefusion == 2 and sum(plan.stages) == 3
    kept.write_bytes(b'{"seconds":[[1.0,1.0],[1.0,3.0]],"counts":[1,2]}')
    slow_second = question(models[4], text=22, devices="cpu:2", pipefusion=2)
    assert choose(run, slow_second).stages == (2, 1)


def test_devices_of_several_kinds_share_the_tokens_by_measured_block_times(run, models, cache, caplog) -> None:
    caplog.set_level(logging.INFO)
    alike = choose(run, question(models[4], text=26, devices="cpu:2", ulysses=2))
    assert alike.shares == (1, 1) and not [*cache.glob("blocktimes-*.json")]
    (kept,) = cache.glob("machine-*.json")
    machine = msgspec.json.decode(kept.read_bytes(), type=Machine)
    kept.write_bytes(msgspec.json.encode(msgspec.structs.replace(machine, kinds=("RTX 4090", "RTX 3090"))))
    choose(run, question(models[4], text=27, devices="cpu:2", ulysses=2))
    (times,) = cache.glob("blocktimes-*.json")
    times.write_bytes(b'{"seconds":[[1.0,1.0],[2.0,2.0]],"counts":[1,2]}')
    plan = choose(run, question(models[4], text=28, devices="cpu:2", ulysses=2))
    assert plan.shares == (100, 50)
    assert "tokens 100 : 50 by speed and memory" in caplog.text
    job = Denoise(models[4], sigmas(2), height=17, width=13, text=(21, 8))
    assert relative_error(run(job, plan), run(job, alike)) <= TOLERANCE


def test_a_plan_that_does_not_fit_is_refused_and_free_memory_is_measured_again_on_workers_that_loaded_all_kernels(
    run, models, cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planner first compares plans whose workers load no kernels early. It then chooses a plan whose workers do."""
    monkeypatch.setattr(host_backend, "wants_kernels_early", lambda plan: plan.pipefusion > 1)
    limit = 2 * 0.9 * 4e-9 * question(models[4]).shape.parameters  # two workers on one device, in GB
    with pytest.raises(Refused, match=r"needs [\d.]+ [GM]B .* each may use .*: use .*(pipefusion 2|weights sharded)"):
        choose(run, question(models[4], devices="cpu:2", memory_limit=limit))
    asked = question(models[4], text=29, devices="cpu:2", pipefusion=0, memory_limit=limit)
    early: list[bool] = []

    def measured(plan: ResolvedPlan, *rest: object) -> tuple[float, ...]:
        free = memory(plan, *rest)
        early.append(run.backend._groups[plan.devices].kernels_early)
        return free

    memory = run.backend._measurements.memory
    monkeypatch.setattr(run.backend._measurements, "memory", measured)
    run.end_workers()
    plan = choose(run, asked)
    assert plan.pipefusion == 2
    assert not early[0] and early[-1]
    asked_of = run.workers()
    run(Denoise(models[4], sigmas(2), height=17, width=13, text=(21, 8)), plan)
    assert run.workers() == asked_of
    early.clear()
    assert choose(run, asked) == plan
    assert early == [True]
