"""Out of memory in a worker gives one error with the numbers and a plan. That plan fits, and the next run works."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest
import torch
from torch import nn

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
    """Return the bytes of the model on the worker that held most in the last run."""
    assert run.answer is not None
    return max(report.weights for report in run.answer.reports)


@pytest.mark.parametrize(
    ("workers", "limit", "advice", "kept"),
    [
        (2, 0.10, "Use weights sharded in Parallel Plan", {"ulysses": 2, "weights": "sharded"}),
        # engine/test_streamed streams weights under a limit
        pytest.param(1, 0.06, "Use weights streamed in Parallel Plan", {"weights": "streamed"}, marks=thorough),
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


def test_a_failing_allocation_is_one_error_with_the_bytes_asked_for_and_held(run, models):
    plan = cpu_plan(ulysses=2)
    run(small(models), cpu_plan())  # starts other workers, so that the next ones hold nothing yet
    expected = run(small(models), plan)
    held = weights(run)
    victim = psutil.Process(run.workers()[1])
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
    asked, free, advice = said.groups()  # which allocation fails depends on the process's earlier memory
    instead = f"{held / 2e6:.3g} MB of weights on each worker instead of {held / 1e6:.3g} MB"
    assert advice == (
        f"Use weights sharded in Parallel Plan, which needs {instead}."
        if float(asked or 0) - float(free) <= held / 2e6
        else "Use more devices, an fp8 weight_dtype, a smaller picture or a smaller batch."
    )
    assert torch.equal(run(small(models), plan), expected)


def test_two_models_stay_on_the_device_if_the_limit_allows_both_and_take_turns_otherwise(run, models):
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
def test_a_worker_killed_while_weights_are_on_the_host_leaves_no_copy_of_them(run: Runner, models, plan):
    """Each stage has one copy for all of its ranks. The copy is freed when the weights are restored, or with the stage's last
    rank.
    """
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
    """Wait until the host has memory for released weights: tests in other processes use and free it too."""
    until = time.monotonic() + 120
    while available_on_host() < HOST_RESERVE + (1 << 30):
        assert time.monotonic() < until, "this machine has too little memory free for weights to wait in"
        time.sleep(0.2)


def copies(pid: int) -> int:
    """Return the number of copies of released weights that a process maps."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:parallel weights")


def test_a_decode_frees_memory_for_its_activations(run, models, tmp_path):
    run.end_workers()  # other tests have left models in them
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
def test_comfyui_frees_one_device_or_all_of_them(
    run: Runner, models, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ComfyUI's own memory management runs, with two devices."""
    comfy_on_path()
    import comfy.model_management as management

    shares = nodes_module("memory.loaded_models", monkeypatch)
    job, names = small(models), ("cpu:0", "cpu:1")
    here, there = map(torch.device, names)
    spec = spec_of("comfyui", job.path)
    weights = SimpleNamespace(backend=run.backend, spec=spec, devices=names, bytes_on=lambda device: 1 << 20)
    model = nn.Module()
    model.remote, model.shares = weights, shares.Shares(weights, here, (here, there))
    patchers = [shares.MainShare(model, load_device=here, offload_device=here)]
    del model
    latents = []

    def listed() -> list[str]:
        devices = [str(entry.device) for entry in management.current_loaded_models]
        return sorted(device for device in devices if device in names)

    def expect(*on_devices: bool, stays: Sequence[str]) -> None:
        assert tuple(run.backend.resident_bytes(spec, name) > 0 for name in names) == on_devices
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
