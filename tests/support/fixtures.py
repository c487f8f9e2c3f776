"""Fixtures that tests of several folders share: a real ComfyUI on the CPU, with tiny models and prompts, and its page."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from parallel_backend.wire.handshake import VARIABLE
from parallel_backend.worker.process.environment import FAULT_FILE
from scripts.comfyui import PACKS, REPO, ComfyUI, Graph
from tests.support.latents import latents
from tests.support.server import fill
from tests.support.tiny.vae import REAL, cogvideox_vae_tensors

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from tests.support.faulty import FaultyComfyUI


@pytest.fixture(scope="session")
def comfyui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyUI]:
    """Start ComfyUI with tiny models: tiny-schnell and tiny-dev (guidance), both fp32 with 4 heads, tiny-3-heads, and sprites.

    NARROW and NARROW_DEV (guidance) have 2 heads, for tests that do not depend on the width: a quarter of the work.

    A test can make a worker fail by writing the file that FAULT_FILE names.
    """
    base_dir = tmp_path_factory.mktemp("comfyui")
    server = ComfyUI(
        os.environ["COMFYUI_PATH"],
        base_dir,
        env={FAULT_FILE: str(base_dir / "fault"), VARIABLE: str(base_dir / "secret")},
        packs={**PACKS, "other-pack": REPO / "tests" / "support" / "other_pack"},
    )
    fill(server)
    with server:
        yield server


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """Start the browser for all tests of the page."""
    from tests.support.page import browser  # imports playwright, which only these tests need

    with browser.chromium() as started:
        yield started


@pytest.fixture(scope="module")
def page(chromium: Browser, comfyui: ComfyUI) -> Iterator[Page]:
    """Open ComfyUI's page as a first-time visitor sees it."""
    from tests.support.page import browser

    with browser.opened(chromium, comfyui) as page:
        yield page


@pytest.fixture(scope="session")
def video_vae(comfyui: ComfyUI) -> Path:
    """Provide a CogVideoX VAE file on the server, in the one size that ComfyUI assumes for this class.

    The encoder's log-variance is very low, so that a sample of diffusers' encoder equals the mean, which ComfyUI takes.
    """
    path = comfyui.base_dir / "models" / "vae" / "cogvideox_vae.safetensors"
    tensors = cogvideox_vae_tensors(REAL, layers=3)
    for name, log_variance in (("weight", 0.0), ("bias", -30.0)):
        tensors[f"encoder.conv_out.conv.{name}"][16:] = log_variance
    save_file({name: tensor.half() for name, tensor in tensors.items()}, path)
    return path


@pytest.fixture(scope="session")
def faulty_comfyui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyComfyUI]:
    """Start a ComfyUI for faults, which a test may end."""
    from tests.support.faulty import FaultyComfyUI  # imports this module

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a child of a background job would ignore it
    with FaultyComfyUI(tmp_path_factory.mktemp("faulty")) as server:
        yield server
    signal.signal(signal.SIGINT, handler)


@pytest.fixture(scope="module")
def latent_of(comfyui: ComfyUI) -> Callable[[Graph], Tensor]:
    """Provide the function of `latents`, which runs a graph on the module's ComfyUI and returns its latent."""
    return latents(comfyui)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
