"""A ComfyUI whose Python has no diffusers, or one that is too new: only models that need diffusers say what to install."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import save_file

from scripts.comfyui import REPO, ComfyUI
from tests.refusals.files import decoding, loading
from tests.support.graphs.comfyui import TOKENS, TOLERANCE, graph_of, save_families
from tests.support.graphs.diffusers import family_graph
from tests.support.graphs.family_checks import assert_stock
from tests.support.graphs.flux import Graph, ksampler_graph, node, parallel
from tests.support.latents import latents, relative_error
from tests.support.other_python import IMPORTED, install_diffusers, python_with
from tests.support.selection import thorough
from tests.support.server import NARROW, fill
from tests.support.tiny import cogvideox as tiny_cogvideox
from tests.support.tiny import pixart as tiny_pixart
from tests.support.tiny.models import draw
from tests.support.tiny.vae import save_cogvideox_vae

pytestmark = thorough
"""These tests start a Python and a ComfyUI of their own; `test_versions` tests which code requests diffusers."""


@pytest.fixture(scope="module", params=["", "0.43.0"], ids=["none", "too new"])
def version(request: pytest.FixtureRequest) -> str:
    """Provide the installed version of diffusers."""
    return str(request.param)


@pytest.fixture(scope="module")
def python(version: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide ComfyUI's Python with this version of diffusers."""
    return python_with(tmp_path_factory.mktemp("python"), version)


@pytest.fixture(scope="module")
def server(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyUI]:
    """Start a ComfyUI with this Python, and models of each kind."""
    server = ComfyUI(os.environ["COMFYUI_PATH"], tmp_path_factory.mktemp("comfyui"), python=python)
    fill(server)
    save_families(server, "wan")
    models = server.base_dir / "models"
    tiny_cogvideox.save_cogvideox(models / "diffusion_models" / "video.safetensors", "2b")
    tiny_pixart.save_pixart(models / "diffusion_models" / "picture.safetensors", prefix="model.diffusion_model.")
    save_cogvideox_vae(models / "vae" / "video-vae.safetensors")
    for side in TOKENS:
        text = {"cond": draw(1, 7, tiny_cogvideox.TEXT_WIDTH, seed=2)}
        save_file(text, server.input_dir / f"video-{side}.safetensors")
    with server:
        yield server


def video() -> Graph:
    """Return a graph of CogVideoX on two workers."""
    size = {"width": 80, "height": 48, "length": 5, "batch_size": 1}
    return family_graph("LoadParallelCogVideoX", "video", "video", node("EmptyHunyuanLatentVideo", **size))


def test_comfyuis_own_models_run_without_diffusers(server: ComfyUI) -> None:
    latent_of = latents(server)
    flux, wan = ksampler_graph(NARROW, width=64, height=64, steps=2, cfg=2.0), graph_of("wan")
    assert relative_error(latent_of(parallel(flux)), latent_of(flux)) <= TOLERANCE
    assert_stock(latent_of, wan)
    assert IMPORTED not in server.log
    assert "diffusers" not in server.log.replace(str(server.base_dir), "")


def test_the_loader_of_a_model_that_needs_diffusers_says_what_to_install(server: ComfyUI, version: str) -> None:
    remedy = "run pip install -r requirements.txt in the pack's folder with ComfyUI's Python."
    said = f"CogVideoX and PixArt need diffusers 0.35 to 0.42, and {version or 'none'} is installed: {remedy}"
    for graph in (video(), loading("picture.safetensors", "PixArt"), decoding("video-vae.safetensors")):
        run = server.queue(graph)
        assert run.error is not None
        assert run.error.exception_message.strip() == said


def test_the_doctor_warns_only_of_diffusers(python: Path, version: str) -> None:
    doctor = [python, "-m", "parallel_backend.doctor", "--json"]
    ran = subprocess.run(doctor, cwd=REPO, capture_output=True, text=True, timeout=300)
    found = {finding["name"]: finding for finding in json.loads(ran.stdout)}
    assert found["diffusers"]["status"] == "warning"
    assert found["diffusers"]["text"].startswith(f"{version or 'not installed'}; CogVideoX and PixArt need ")
    assert found["2 workers, cpu"]["status"] == "ok"
    assert ran.returncode == 0


def test_after_diffusers_is_installed_new_workers_replace_the_running_ones(server: ComfyUI, python: Path) -> None:
    before = ksampler_graph(NARROW, width=64, height=64, steps=2, seed=99)
    latents(server)(parallel(before))
    install_diffusers(python)
    server.queue(video(), timeout=300).check()
