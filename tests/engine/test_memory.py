"""Out of memory in a worker: one error with the numbers and a plan that fits, which it does; and the next run works."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from torch import nn

from parallel_backend.diffusion import ModelSpec
from parallel_backend.host import Backend
from parallel_backend.host.workers.causes import WorkerOutOfMemory
from parallel_backend.plan import ParallelPlan
from parallel_backend.worker.memory.rank_memory import HOST_RESERVE, available_on_host
from tests.engine.conftest import Job, Runner, sigmas, spec_of
from tests.support.comfy_oracle import comfy_on_path
from tests.support.nodes_module import nodes_module
from tests.support.plans import cpu_plan
from tests.support.selection import thorough
from tests.vae.comfy_vaes import save_comfy_vae

AFTERWARDS = "The workers were stopped; queue the prompt again and they start afresh."


def small(models: dict[int, Path], heads: int = 4) -> Job:
    return Job(models[heads], sigmas(1))


def weights(run: Runner) -> int:
    """Bytes of the model on the fullest worker of the last run."""
    assert run.answer is not None
    return max(report.weights for report in run.answer.reports)


def worker(rank: int) -> psutil.Process:
    """The worker of a rank that this process's fork server has; a ComfyUI of other tests has its own."""
    servers = psutil.Process().children()
    (found,) = (p for server in servers for p in server.children() if p.name() == f"parallel-rank{rank}")
    return found


@pytest.mark.parametrize(
    ("workers", "limit", "advice", "kept"),
    [
        (2, 0.10, "Use weights sharded in Parallel Plan", {"ulysses": 2, "weights": "sharded"}),
        (1, 0.06, "Use weights streamed in Parallel Plan", {"weights": "streamed"}),
    ],
    ids=["2 workers", "1 worker"],
)
def test_a_part_over_the_limit_is_one_error_with_a_plan_that_fits(run, models, workers, limit, advice, kept):
    job = small(models)
    expected = run(job, cpu_plan(ulysses=workers))
    whole = weights(run)
    with pytest.raises(WorkerOutOfMemory) as caught:
        run(job, cpu_plan(ulysses=workers, memory_limit=limit))
    assert isinstance(caught.value, torch.OutOfMemoryError)
    share = limit / workers
    words = (
        rf"Worker [01] of {workers} \(cpu\) ran out of memory while making room for the model: it asked for {whole / 1e6:.3g} MB "
        rf"with {share * 1e3:.3g} MB free, and held no weights\. {advice}, which needs (?:about )?(\d+)\.?\d* MB of "
        rf"weights on each worker instead of {whole / 1e6:.3g} MB\. {AFTERWARDS}"
    )
    assert re.fullmatch(words, str(caught.value))
    fitting = cpu_plan(**kept)
    again = run(job, cpu_plan(memory_limit=share * fitting.world_size, **kept))
    assert weights(run) <= share * 1e9
    assert torch.allclose(again, expected, rtol=1e-3, atol=1e-4)


def test_an_allocation_that_fails_is_one_error_that_says_how_much_was_asked_and_what_was_held(run, models):
    plan = cpu_plan(ulysses=2)
    run(small(models), cpu_plan())  # other workers, so that the next ones hold nothing yet
    expected = run(small(models), plan)
    held = weights(run)
    victim = worker(1)
    room = victim.memory_info().vms + (16 << 20)
    victim.rlimit(psutil.RLIMIT_AS, (room, room))
    large = Job(models[4], sigmas(1), height=256, width=256)
    with pytest.raises(WorkerOutOfMemory) as caught:
        run(large, plan)
    words = (
        r"Worker 1 of 2 \(cpu\) ran out of memory while [a-z ]+(?:, step 1)?: it asked for (?:more memory|(\d+\.?\d*) MB) with "
        rf"(\d+\.?\d*) MB free, and held {held / 1e6:.3g} MB of 4\.safetensors\. (.*) {AFTERWARDS}"
    )
    said = re.fullmatch(words, str(caught.value))
    assert said, caught.value
    asked, free, advice = said.groups()  # which allocation fails depends on what the process has had before
    instead = f"{held / 2e6:.3g} MB of weights on each worker instead of {held / 1e6:.3g} MB"
    assert advice == (
        f"Use weights sharded in Parallel Plan, which needs {instead}."
        if float(asked or 0) - float(free) <= held / 2e6
        else "Use more devices, an fp8 weight_dtype, a smaller picture or a smaller batch."
    )
    assert torch.equal(run(small(models), plan), expected)


def test_two_models_stay_within_a_limit_for_both_and_take_turns_within_one_for_one(run, models):
    plan = cpu_plan(ulysses=2)
    one, other = small(models, 4), small(models, 3)
    first, second = run(one, plan), run(other, plan)
    reports = run.answer.reports
    assert {Path(held.model.path).stem for held in reports[0].models_on_device} == {"3", "4"}
    assert all(report.on_host == report.restored == 0 for report in reports)
    both = sum(held.nbytes for held in reports[0].models_on_device)
    tight = cpu_plan(ulysses=2, memory_limit=2 * (both - 1) / 1e9)
    for job, expected in [(one, first), (other, second), (one, first)]:
        assert torch.equal(run(job, tight), expected)
        for report in run.answer.reports:
            assert [held.model.path for held in report.models_on_device] == [str(job.path)]
            assert report.weights + sum(report.on_host for report in run.answer.reports) == both, "one copy for both"
        assert {report.restored for report in run.answer.reports} <= {0, report.weights}
    assert run.answer.reports[0].restored == run.answer.reports[0].weights


@thorough
@pytest.mark.parametrize(
    "plan", [cpu_plan(ulysses=2), cpu_plan(pipefusion=2, ulysses=2, cfg=2)], ids=lambda plan: plan.degrees
)
def test_a_worker_that_dies_while_weights_wait_leaves_no_copy_of_them(run: Runner, models, plan):
    """Each stage has one copy, whatever its ranks; it goes when they are restored, or with the last of them."""
    job = small(models)
    run.end_workers()
    expected = run(job, plan)
    held = [report.weights for report in run.answer.reports]
    for _ in range(2):
        before = run.workers()
        for _ in range(2):
            wait_for_room()
            run.backend.release(spec_of("comfyui", job.path))
            assert [copies(pid) for pid in before] == [1] * plan.world_size
        ranks = [rank for group in run.backend.status().groups for rank in group.ranks]
        assert sum(rank.on_host for rank in ranks) == sum(held) * plan.pipefusion // plan.world_size
        assert torch.equal(run(job, plan), expected)
        assert [copies(pid) for pid in before] == [0] * plan.world_size
    run.backend.release(spec_of("comfyui", job.path))
    psutil.Process(before[1]).kill()
    assert torch.equal(run(job, plan), expected)
    assert not any(map(psutil.pid_exists, before))
    assert not any(copies(process.pid) for process in (psutil.Process(), *psutil.Process().children(recursive=True)))


def wait_for_room() -> None:
    """Until the machine has memory in which weights may wait: other tests beside this one take and give it."""
    until = time.monotonic() + 120
    while available_on_host() < HOST_RESERVE + (1 << 30):
        assert time.monotonic() < until, "this machine has too little memory free for weights to wait in"
        time.sleep(0.2)


def copies(pid: int) -> int:
    """How many copies of weights off their devices a process sees."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:parallel weights")


def test_what_a_decode_computes_with_is_made_room_for(run, models, tmp_path):
    run.end_workers()  # with what other tests have left in them
    run(small(models), cpu_plan(ulysses=2))
    held, room = weights(run), 10_000_000
    vae = tmp_path / "vae.safetensors"
    save_comfy_vae(vae, "wan")
    latent = torch.zeros(1, 16, 1, 8, 8)
    run.decode(vae, latent, ParallelPlan(devices="cpu:2"), 0)
    both = held + weights(run)
    requested_plan = ParallelPlan(devices="cpu:2", memory_limit=2 * (both + room) / 1e9)
    for working, on_host in [(room // 2, 0), (2 * room, held)]:
        run.decode(vae, latent, requested_plan, working)
        assert [2 * report.on_host for report in run.answer.reports] == [on_host] * 2


@pytest.mark.parametrize("workers", [2])
def test_comfyui_takes_a_model_off_the_device_that_it_asks_for_and_off_all_when_it_unloads_all(
    run: Runner, models, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own memory management, which has two devices here."""
    comfy_on_path()
    import comfy.model_management as management

    shares = nodes_module("memory.loaded_models", monkeypatch)
    job, names = small(models), ("cpu:0", "cpu:1")
    here, there = map(torch.device, names)
    weights = Weights(run.backend, spec_of("comfyui", job.path), names)
    model = nn.Module()
    model.remote, model.shares = weights, shares.Shares(weights, here, (here, there))
    patchers = [shares.MainShare(model, load_device=here, offload_device=here)]
    del model
    latents = []

    def listed() -> list[str]:
        devices = [str(entry.device) for entry in management.current_loaded_models]
        return sorted(device for device in devices if device in names)

    def expect(*on_devices: bool, stays: Sequence[str]) -> None:
        assert tuple(run.backend.resident_bytes(weights.spec, name) > 0 for name in names) == on_devices
        assert listed() == [*stays]

    def sample() -> None:
        management.load_models_gpu(patchers)
        latents.append(run(job, msgspec.structs.replace(cpu_plan(ulysses=2), devices=names)))
        expect(True, True, stays=names)

    sample()
    management.free_memory(1e30, there)
    expect(True, False, stays=names[:1])
    sample()
    management.free_memory(1e30, here)
    expect(False, True, stays=names[1:])
    sample()
    entry = next(entry for entry in management.current_loaded_models if entry.device == here)
    assert not entry.model_unload(1), "a part is enough"
    expect(False, True, stays=names)
    sample()
    for device in (here, there):  # as unload_all_models does
        management.free_memory(1e30, device)
    expect(False, False, stays=())
    sample()
    assert all(torch.equal(latent, latents[0]) for latent in latents)
    del entry
    patchers.clear()
    gc.collect()
    assert not listed(), "what nobody uses is no model of ComfyUI's"
    run.end_workers()


@dataclass(frozen=True)
class Weights:
    """A model in the workers, as ComfyUI's memory management is told of it."""

    backend: Backend
    spec: ModelSpec
    devices: tuple[str, ...]

    def bytes_on(self, device: torch.device) -> int:
        return 1 << 20
