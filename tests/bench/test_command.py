"""The benchmark's command: its refusals, and a whole benchmark through real ComfyUIs, to its end and interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from parallel_backend.bench.__main__ import main
from parallel_backend.bench.client import Graph
from parallel_backend.bench.record import STOCK, Record, decoded
from tests.support.graphs.combined import with_guider
from tests.support.graphs.flux import insert_after, insert_after_model, ksampler_graph, node
from tests.support.selection import thorough
from tests.support.tiny.flux import save_conditioning, save_flux

REPO = Path(__file__).parents[2]
COMFYUI = os.environ["COMFYUI_PATH"]
TOLERANCE = 1e-5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--comfyui", os.devnull), "/dev/null is not ComfyUI's folder: name it with --comfyui."),
        (("--out", "/no such folder"), "/no such folder is not a folder"),
        (("--graph", "/none.json"), "/none.json holds no graph"),
        (("--devices", "9"), "asks for GPU 9"),
        (("--devices", "tcp://10.0.0.1:29600"), "are other machines' devices"),
        (("--graph", "graph.json"), "The graph has none of KSampler, "),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_sentence_before_anything_starts(
    arguments: tuple[str, ...],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """test_graphs has the other graphs that are refused."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # a signal handler would outlive this test
    monkeypatch.chdir(tmp_path)
    loader = {"class_type": "UNETLoader", "inputs": {"unet_name": "a.safetensors", "weight_dtype": "default"}}
    Path("graph.json").write_text(json.dumps({"1": loader}))
    assert main(("--comfyui", COMFYUI, *arguments)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("python -m parallel_backend.bench: ") and said in line


def begin(out: Path, *arguments: str, comfyui: str = COMFYUI) -> subprocess.Popen[str]:
    """Start the command, on the small picture unless the arguments name a graph."""
    command = [sys.executable, "-m", "parallel_backend.bench", "--comfyui", comfyui, "--out", str(out), *arguments]
    return subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def record_in(out: Path) -> Record:
    (file,) = out.glob("*.json")
    return decoded(file.read_bytes())


@thorough
def test_a_benchmark_compares_equal_latents_of_stock_and_ours(tmp_path: Path) -> None:
    with begin(tmp_path, "--steps", "4") as command:
        said, _ = command.communicate(timeout=800)
    assert command.returncode == 0, said
    found = record_in(tmp_path)
    assert [(side.name, side.failed) for side in found.sides] == [(STOCK, ""), ("cpu:1", ""), ("cpu:2", "")], said
    assert all(side.error is not None and side.error <= TOLERANCE for side in found.sides[1:])
    assert found.sides[0].error is None
    for side in found.sides:
        assert side.step > 0 and side.peak["cpu"] > 1 << 28
        assert side.first is not None and side.then is not None and side.then.denoise > 0
    assert [side.sent > 0 for side in found.sides] == [False, False, True]
    assert found.links is not None and found.links.ranks == 2
    assert f"Kept in {tmp_path}" in said and "| 2026" not in said.partition("\n")[0]


@thorough
def test_an_interrupted_benchmark_keeps_its_results_and_leaves_no_processes(tmp_path: Path) -> None:
    with begin(tmp_path, "--steps", "4", "--devices", "cpu:1", "cpu:2") as command:
        deadline = time.monotonic() + 600
        while not list(tmp_path.glob("*.json")) and time.monotonic() < deadline:
            time.sleep(0.1)
        below = psutil.Process(command.pid).children(recursive=True)
        command.send_signal(signal.SIGTERM)
        said, _ = command.communicate(timeout=120)
    assert command.returncode == 130, said
    assert [side.name for side in record_in(tmp_path).sides] == [STOCK]
    assert "interrupted: the finished measurements are kept." in said
    assert not psutil.wait_procs(below, timeout=30)[1]


def begin_own(folder: Path, graph: Graph, *arguments: str) -> subprocess.Popen[str]:
    """Start the command on a user's graph, in a ComfyUI folder with other models and inputs: a tiny FLUX.1 dev and a prompt."""
    mine = folder / "ComfyUI"
    for name in ("models/diffusion_models", "input", "custom_nodes"):
        (mine / name).mkdir(parents=True)
    for each in Path(COMFYUI).iterdir():
        if each.name not in ("models", "input", "output", "custom_nodes"):
            (mine / each.name).symlink_to(each)
    save_flux(mine / "models" / "diffusion_models" / "mine.safetensors", guidance=True)
    save_conditioning(mine / "input" / "prompt.safetensors", 37)
    (folder / "mine.json").write_text(json.dumps(graph))
    return begin(folder, "--graph", str(folder / "mine.json"), *arguments, comfyui=str(mine))


def own_graph() -> Graph:
    """Return a typical user's graph of FLUX.1 dev: a prompt with guidance, a shifted model, and separate nodes for sampling."""
    graph = ksampler_graph("mine", positive="prompt", negative="prompt", width=96, height=64, seed=11, steps=3)
    graph["latent"]["class_type"] = "EmptySD3LatentImage"
    graph = with_guider(graph, node("BasicGuider", model=["model", 0], conditioning=["positive", 0]))
    graph = insert_after(graph, "positive", "FluxGuidance", "conditioning", guidance=3.5)
    return insert_after_model(graph, "ModelSamplingFlux", max_shift=1.15, base_shift=0.5, width=96, height=64)


@thorough
def test_a_users_graph_is_measured_with_the_models_of_the_users_comfyui(tmp_path: Path) -> None:
    """The model's loader and the prompt's node are the user's; the arguments request another size and number of steps."""
    asked = ("--steps", "4", "--size", "128x64", "--devices", "cpu:2")
    with begin_own(tmp_path, own_graph(), *asked) as command:
        said, _ = command.communicate(timeout=800)
    assert command.returncode == 0, said
    (tmp_path / "mine.json").unlink()
    found = record_in(tmp_path)
    assert (found.job.graph, found.job.files, found.job.size) == ("mine", ["mine.safetensors"], "128x64")
    assert [(side.name, side.failed) for side in found.sides] == [(STOCK, ""), ("cpu:2", "")], said
    assert found.sides[1].error is not None and found.sides[1].error <= TOLERANCE
    assert "mine.safetensors, 128x64, 4 steps" in said
    assert not any((tmp_path / "ComfyUI" / folder).exists() for folder in ("output", "user"))


@thorough
def test_a_graph_that_comfyui_refuses_gives_one_sentence(tmp_path: Path) -> None:
    graph = own_graph()
    graph["select"]["inputs"]["sampler_name"] = "nobodys"
    with begin_own(tmp_path, graph, "--devices", "cpu:1") as command:
        said, _ = command.communicate(timeout=800)
    assert command.returncode == 1, said
    assert "stock ComfyUI: stock ComfyUI, first: " in said and "'nobodys' not in" in said
    assert "Traceback" not in said
