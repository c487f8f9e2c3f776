"""A real ComfyUI on the CPU for all tests of this folder, with tiny models and prompts in its folders."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from parallel_backend.wire.secret import VARIABLE
from parallel_backend.worker.process.environment import FAULT_FILE
from scripts.comfyui import PACKS, REPO, ComfyUI, Graph, Run
from tests.tiny_flux import save_conditioning, save_flux
from tests.tiny_vae import REAL, cogvideox_vae_tensors

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from tests.host.faulty import FaultyComfyUI

TEXT_LENGTHS = (1, 37, 256, 300, 512)
NARROW, NARROW_DEV = "narrow-schnell", "narrow-dev"

OTHER_LENGTH = 45
"""For a second text, where all that matters is that it is longer than the first."""


@pytest.fixture(scope="session")
def comfyui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyUI]:
    """The server. Models: tiny-schnell, tiny-dev (guidance), each fp32 with 4 heads, tiny-3-heads, and sprites.

    Beside those NARROW and NARROW_DEV (guidance) with 2 heads, for what does not hang on a model's width: a quarter of the work.

    A test may make a worker fail by writing the file that FAULT_FILE names.
    """
    base_dir = tmp_path_factory.mktemp("comfyui")
    server = ComfyUI(
        os.environ["COMFYUI_PATH"],
        base_dir,
        env={FAULT_FILE: str(base_dir / "fault"), VARIABLE: str(base_dir / "secret")},
        packs={**PACKS, "other-pack": REPO / "tests" / "host" / "other_pack"},
    )
    fill(server)
    with server:
        yield server


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """The browser, for all tests of the page."""
    from tests.host import browser  # which needs playwright

    with browser.chromium() as started:
        yield started


@pytest.fixture(scope="module")
def page(chromium: Browser, comfyui: ComfyUI) -> Iterator[Page]:
    """ComfyUI's page, as a visitor finds it who was never there before."""
    from tests.host import browser

    with browser.opened(chromium, comfyui) as page:
        yield page


def fill(server: ComfyUI) -> None:
    """Put the tests' models and prompts into a server's folders."""
    models = server.base_dir / "models" / "diffusion_models"
    save_flux(models / "tiny-schnell.safetensors")
    save_flux(models / "tiny-dev.safetensors", guidance=True, seed=1)
    save_flux(models / "tiny-3-heads.safetensors", heads=3, seed=2)
    save_flux(models / f"{NARROW}.safetensors", heads=2, seed=3)
    save_flux(models / f"{NARROW_DEV}.safetensors", heads=2, guidance=True, seed=4)
    sprites = REPO / "workflows" / "sprites"
    server.add_model("diffusion_models", [sprites / "sprites-flux-schnell.safetensors"])
    server.add_model("vae_approx", sprites.glob("taef1_*.safetensors"))
    server.add_input([*sprites.glob("*-on-*.safetensors"), sprites / "empty.safetensors"])
    for tokens in (*TEXT_LENGTHS, OTHER_LENGTH):
        save_conditioning(server.input_dir / f"cond-{tokens}.safetensors", tokens)
    save_conditioning(server.input_dir / "cond-37-other.safetensors", 37, seed=1)


@pytest.fixture(scope="session")
def video_vae(comfyui: ComfyUI) -> Path:
    """A CogVideoX VAE among the server's files, of the one size that ComfyUI takes it to have.

    It is sure of its latents, so that a sample of diffusers' encoder is the mean that ComfyUI takes.
    """
    path = comfyui.base_dir / "models" / "vae" / "cogvideox_vae.safetensors"
    tensors = cogvideox_vae_tensors(REAL, layers=3)
    for name, log_variance in (("weight", 0.0), ("bias", -30.0)):
        tensors[f"encoder.conv_out.conv.{name}"][16:] = log_variance
    save_file({name: tensor.half() for name, tensor in tensors.items()}, path)
    return path


@pytest.fixture(scope="session")
def faulty_comfyui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyComfyUI]:
    """A ComfyUI for faults, which a test may end."""
    from tests.host.faulty import FaultyComfyUI  # which imports this module

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a child of a background job would ignore it
    with FaultyComfyUI(tmp_path_factory.mktemp("faulty")) as server:
        yield server
    signal.signal(signal.SIGINT, handler)


@pytest.fixture(scope="session")
def latent_of(comfyui: ComfyUI) -> Callable[[Graph], Tensor]:
    """As `latents`."""
    return latents(comfyui)


def latents(server: ComfyUI) -> Callable[[Graph], Tensor]:
    """Runs a graph and returns the latent its node "save" saved (fp64); the same graph is run only once."""
    done: dict[str, Tensor] = {}

    def latent(graph: Graph) -> Tensor:
        key = repr(graph)
        if key not in done:
            done[key] = saved_latent(server, server.queue(graph, timeout=300).check())
        return done[key]

    return latent


def saved_latent(server: ComfyUI, run: Run, node_id: str = "save") -> Tensor:
    """The latent that a SaveLatent node of a run wrote, in fp64."""
    (file,) = server.files(run, node_id)
    return load_file(Path(file))["latent_tensor"].double()


def relative_error(result: Tensor, reference: Tensor) -> float:
    """Relative L2 error; NaN counts as infinite."""
    assert result.shape == reference.shape
    error = ((result - reference).norm() / reference.norm()).item()
    return error if error == error else float("inf")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
