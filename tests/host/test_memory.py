"""Memory shared with ComfyUI: /free at any time, models that take turns without growth, limits, and too little memory."""

from __future__ import annotations

import importlib
import re
import sys
from types import ModuleType

import psutil
import pytest
import torch

from parallel_backend.diffusion import ModelSpec
from parallel_backend.host import Backend
from scripts.comfyui import REPO, ComfyUI
from tests.support.comfy_oracle import comfy_on_path
from tests.support.faulty import wait_until, workers_among
from tests.support.graphs.flux import Graph, ksampler_graph, parallel, queue_logged
from tests.support.latents import relative_error, saved_latent
from tests.support.leaving import RESTORED, free_until, of_workers, on_devices
from tests.support.ranks import run_ranks
from tests.support.selection import thorough
from tests.support.server import NARROW
from tests.support.tiny.formats import save_sparse

RELEASED = re.compile(r"Parallel: (\S+) released; the workers now use (\S+) MiB on their devices and (\S+) MiB of host")
MODELS = ("tiny-schnell", "tiny-3-heads")
MEBIBYTE = 1 << 20


def job(model: str = NARROW, seed: int = 0, steps: int = 2) -> Graph:
    return ksampler_graph(model, width=64, height=64, steps=steps, seed=seed)


def held_after_release(server: ComfyUI, file: str, since: int) -> tuple[float, float]:
    """Return the MiB on devices and in host memory after a file's first release in the log since `since`.

    The file is found by name. ComfyUI collects models of an earlier graph at any time, at most every ten seconds, and a model
    of another test may be released at any time.
    """

    def released() -> list[tuple[str, str, str]]:
        return [found for found in RELEASED.findall(server.log[since:]) if found[0] == file]

    wait_until(released, 30)
    _, on_devices, on_host = released()[0]
    return float(on_devices), float(on_host)


def sample_with_nothing_else_on_devices(server: ComfyUI, graph: Graph) -> int:
    """Sample after the models of other tests have left the workers' devices; return the log's length before the run.

    An earlier request to free memory may still take effect after the prompt.
    """
    server.free()
    server.queue(parallel(graph), timeout=300).check()
    free_until(server, lambda: on_devices(server) == 0)
    graph["sampler"]["inputs"]["seed"] += 1
    before = len(server.log)
    server.queue(parallel(graph), timeout=300).check()
    return before


def test_free_while_idle_empties_the_devices_and_the_next_prompt_restores_the_model(comfyui, latent_of):
    expected = latent_of(job(seed=101))
    before = sample_with_nothing_else_on_devices(comfyui, job(seed=111))
    processes = workers_among(comfyui.children())
    name = f"{NARROW}.safetensors"
    waiting = of_workers(comfyui, lambda rank: rank["on_host"]) / MEBIBYTE
    free_until(comfyui, lambda: f"Parallel: {name} released" in comfyui.log[before:])
    on_devices, on_host = held_after_release(comfyui, name, before)
    assert on_devices == 0
    size = (comfyui.base_dir / "models" / "diffusion_models" / name).stat().st_size / MEBIBYTE
    assert on_host - waiting == pytest.approx(size, rel=0.01), "one copy for both workers"
    run, log = queue_logged(comfyui, parallel(job(seed=101)))
    assert relative_error(saved_latent(comfyui, run.check()), expected) <= 1e-5
    assert float(RESTORED.search(log)[2]) == pytest.approx(2 * size, rel=0.01)
    assert "loaded" not in log.split("Prompt executed")[0].split("Parallel: narrow")[0]
    assert workers_among(comfyui.children()) == processes


@thorough
def test_free_while_loading_lets_the_prompt_finish_first(comfyui, latent_of):
    expected = latent_of(job(seed=120))
    save_sparse(comfyui.base_dir / "models" / "diffusion_models" / "large.safetensors", heads=24)
    graph = parallel(job("large", seed=120, steps=1))
    graph["model"]["inputs"]["weight_dtype"] = "fp8_e4m3fn"
    before, loading = len(comfyui.log), []

    def at_text(told) -> None:
        if told.text.startswith("Loading") and not loading:
            loading.append(told.text)
            comfyui.free()

    comfyui.queue(graph, on_text=at_text, timeout=300).check()
    done, total = re.fullmatch(r"Loading (\d\.\d) of (\d\.\d) GB", loading[0]).groups()
    assert float(done) < float(total) > 1, "it is in the middle of it"
    assert held_after_release(comfyui, "large.safetensors", before)[0] == 0
    run = comfyui.queue(parallel(job(seed=120)), timeout=300).check()
    assert relative_error(saved_latent(comfyui, run), expected) <= 1e-5


def test_free_while_sampling_lets_the_prompt_finish_first(comfyui, latent_of):
    expected = latent_of(job(seed=120))
    before, asked = len(comfyui.log), []

    def at_step(progress) -> None:
        if not asked:
            asked.append(progress.value)
            comfyui.free()

    sampling = parallel(job(seed=121, steps=20))
    comfyui.wait(comfyui.submit(sampling), on_progress=at_step, timeout=300).check()
    assert asked == [1]
    assert held_after_release(comfyui, f"{NARROW}.safetensors", before)[0] == 0
    run = comfyui.queue(parallel(job(seed=120)), timeout=300).check()
    assert relative_error(saved_latent(comfyui, run), expected) <= 1e-5


def both_models(prompt: int, **plan: float) -> Graph:
    """Return a graph with both models, in which only one model's sampler has new work, so that the models take turns."""
    graph: Graph = {}
    for index, model in enumerate(MODELS):
        latest = prompt - (prompt - index) % 2
        one = parallel(job(model, seed=200 + max(index, latest), steps=1), **plan)
        for name, inner in one.items():
            links = {key: [f"{index}{v[0]}", v[1]] if isinstance(v, list) else v for key, v in inner["inputs"].items()}
            graph[f"{index}{name}"] = {"class_type": inner["class_type"], "inputs": links}
    return graph


def one_model(prompt: int, **plan: float) -> Graph:
    return parallel(job(MODELS[prompt % 2], seed=200 + prompt, steps=1), **plan)


@thorough  # the quick run has two models that take turns in tests/engine/test_memory.py
@pytest.mark.parametrize(
    ("graph", "limit", "moves"),
    [
        (both_models, 0.0, range(3)),
        (both_models, 0.2, range(18, 22)),
        (one_model, 0.0, range(21)),
    ],
    ids=["both resident", "one at a time", "each in its own graph"],
)
def test_two_models_take_turns_over_20_prompts_without_growth(comfyui, graph, limit, moves):
    """One worker holds 71 and 40 MiB; the limit leaves each worker room for the larger model and its computation."""
    first = parallel(job(MODELS[0], seed=199, steps=1), ulysses=2)  # so that neither model is in the first graph's way
    comfyui.queue(first, timeout=300).check()
    sizes: list[int] = []
    restored = 0
    for prompt in range(20):
        run, log = queue_logged(comfyui, graph(prompt, ulysses=2, memory_limit=limit))
        run.check()
        restored += len(RESTORED.findall(log))
        everyone = [psutil.Process(comfyui.process.pid), *workers_among(comfyui.children())]
        sizes.append(sum(process.memory_info().rss for process in everyone))
    assert restored in moves
    assert max(sizes[6:]) - max(sizes[:6]) <= 64 * MEBIBYTE
    before = len(comfyui.log)
    free_until(comfyui, lambda: RELEASED.search(comfyui.log[before:]) and on_devices(comfyui) == 0)
    assert float(RELEASED.findall(comfyui.log[before:])[-1][2]) > 0


def test_a_limit_below_the_models_part_is_refused_with_the_numbers_and_a_plan_that_fits(comfyui):
    run = comfyui.queue(parallel(job(MODELS[0], seed=300), ulysses=2, memory_limit=0.12), timeout=300)
    assert run.status == "error"
    said = run.error.exception_message
    found = re.search(
        r"needs ([\d.]+) MB for each worker \(([\d.]+) MB of it weights\), and each may use 60 MB \(memory_limit 0\.12\): "
        r"use (pipefusion 2|.*weights sharded), which needs ([\d.]+) MB",
        said,
    )
    assert found, said
    assert float(found[1]) > float(found[2]) > 60 >= float(found[4])


# the quick run has the refusal in plan/test_free_memory, and the workers' free memory in engine/test_planner
@thorough
def test_a_worker_with_too_little_free_memory_is_refused_before_it_computes(comfyui):
    comfyui.queue(parallel(job(MODELS[0], seed=320), ulysses=2), timeout=300).check()
    victim = workers_among(comfyui.children())[1]
    room = victim.memory_info().vms + 8 * MEBIBYTE
    unlimited = victim.rlimit(psutil.RLIMIT_AS)
    victim.rlimit(psutil.RLIMIT_AS, (room, unlimited[1]))
    large = parallel(ksampler_graph(MODELS[0], width=1280, height=1280, steps=1, seed=321), ulysses=2)
    message = comfyui.queue(large, timeout=300).error.exception_message
    found = re.match(
        r"Not enough memory: the smallest plan, ulysses 2, needs (\d+) MB on worker 1 of 2 .* and worker 1 of 2 has ([\d.]+) MB "
        r"free: ",
        message,
    )
    assert found, message
    assert float(found[1]) > float(found[2])
    victim.rlimit(psutil.RLIMIT_AS, unlimited)
    comfyui.queue(large, timeout=300).check()


def test_comfyuis_models_leave_a_device_only_when_workers_need_its_memory():
    comfy_on_path()

    def models_left(_: int) -> list[int]:
        import comfy.model_management as management
        from comfy.model_patcher import ModelPatcher

        # without the packages' own imports, which need a whole ComfyUI
        for name, path in (("pack", REPO), ("pack.nodes", REPO / "nodes")):
            sys.modules[name] = package = ModuleType(name)
            package.__path__ = [str(path)]
        free_devices = importlib.import_module("pack.nodes.memory.devices").free_devices
        cpu = torch.device("cpu")
        module = torch.nn.Linear(64, 64)
        module.device = cpu
        patcher = ModelPatcher(module, load_device=cpu, offload_device=cpu)
        management.load_models_gpu([patcher])
        model = ModelSpec("comfyui", "file", 0, 0, "float32", "")
        left = []
        for each in (1.0, 1e18):
            free_devices(Backend(), model, ["cpu", "cpu"], each)
            left.append(len(management.current_loaded_models))
        return left

    # A separate process: torch keeps one operator for each name, which would be that of this second import of the pack.
    assert run_ranks(1, models_left) == [[1, 0]]
