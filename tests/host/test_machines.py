"""A real ComfyUI whose plan names workers that torchrun started gives the same latents and pixels."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from parallel_backend.host.workers.remote import ask
from parallel_backend.wire.address import SCHEME, Address
from parallel_backend.wire.handshake import VARIABLE
from scripts.comfyui import REPO, ComfyUI, Graph, free_port
from tests.support.graphs.flux import ksampler_graph, node, parallel
from tests.support.latents import relative_error
from tests.support.selection import thorough
from tests.vae.comfy_vaes import save_image_vae

pytestmark = thorough

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def address(comfyui: ComfyUI, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    """Start a group of two ranks on the loopback interface, with model files in a separate folder."""
    folder = tmp_path_factory.mktemp("elsewhere")
    vae = save_image_vae(comfyui.base_dir / "models" / "vae" / "elsewhere.safetensors")
    shutil.copy(vae, folder)
    model = comfyui.base_dir / "models" / "diffusion_models" / "tiny-dev.safetensors"
    shutil.copy(model, folder / "renamed.safetensors")
    secret = comfyui.env[VARIABLE]
    Path(secret).touch(mode=0o600)
    Path(secret).write_text("the secret of a test's workers")
    address, rendezvous = Address("127.0.0.1", free_port()), free_port()
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("--master-addr", address.host, "--master-port", str(rendezvous), "-m", "parallel_backend.worker"),
        *("--listen", str(address).removeprefix(SCHEME), "--device", "cpu", "--models", str(folder)),
        *("--secret", secret, "--comfyui", os.environ["COMFYUI_PATH"]),
    ]
    with (folder / "log").open("wb") as log, pytest.MonkeyPatch.context() as patch:
        agent = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=REPO, stdout=log, stderr=log)
        try:
            patch.setenv(VARIABLE, secret)
            ask(address, seconds=480)
            yield address
        except ValueError as error:
            pytest.fail(f"{error}\n{(folder / 'log').read_text(errors='replace')}")
        finally:
            agent.send_signal(signal.SIGTERM)
            agent.wait(60)


def test_ksampler_on_workers_of_torchrun_equals_comfyuis(
    address: Address, latent_of: Callable[[Graph], Tensor]
) -> None:
    graph = ksampler_graph("tiny-dev", width=136, height=200, steps=3)
    assert relative_error(latent_of(parallel(graph, str(address), ulysses=2)), latent_of(graph)) <= TOLERANCE


def test_pixels_of_workers_of_torchrun_equal_comfyuis(
    comfyui: ComfyUI, address: Address, latent_of: Callable[[Graph], Tensor]
) -> None:
    """These workers cannot pass pixels in shared memory."""
    latent = torch.randn(1, 16, 9, 7, generator=torch.Generator().manual_seed(1))
    tensors = {"latent_tensor": latent, "latent_format_version_0": torch.tensor([])}
    save_file(tensors, comfyui.input_dir / "elsewhere.latent")
    graph = {
        "vae": node("VAELoader", vae_name="elsewhere.safetensors"),
        "latent": node("LoadLatent", latent="elsewhere.latent"),
        "pixels": node("VAEDecode", samples=["latent", 0], vae=["vae", 0]),
        "encoded": node("VAEEncode", pixels=["pixels", 0], vae=["vae", 0]),
        "save": node("SaveLatent", samples=["encoded", 0], filename_prefix="test"),
    }
    swapped = graph | {
        "plan": node("ParallelPlan", devices=str(address), ulysses=0, ring=0, attention="auto"),
        "vae": node("LoadParallelVAE", vae_name="elsewhere.safetensors", plan=["plan", 0]),
    }
    assert relative_error(latent_of(swapped), latent_of(graph)) <= TOLERANCE
