"""SDXL as published, all blocks at their real width: a checkpoint on two workers equals the stock loader's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import requests
from safetensors.torch import save_file

from parallel_backend.wire.handshake import VARIABLE
from scripts.comfyui import ComfyUI
from tests.support.comfy_oracle import comfy_on_path
from tests.support.graphs.comfyui import TOKENS, TOLERANCE, graph_of, save_latent, spread
from tests.support.graphs.flux import node, queue_logged, ways
from tests.support.latents import relative_error, saved_latent
from tests.support.selection import thorough
from tests.support.tiny.comfyui import TINY, save_fp8

pytestmark = thorough

NAME = "wide_sdxl"
FILE = f"{NAME}.safetensors"
PARAMETERS = 2_567_463_684
"""Number of parameters of the published model."""

NEEDED = 10 << 30
"""Bytes of memory: the weights in fp8 for two workers and for the stock loader, and the other memory of four processes."""

PATIENCE = {"PARALLEL_DEADLINES": "stall=3000"}
"""Environment with a longer deadline for one forward, on a CPU that other processes use too."""


@pytest.fixture
def comfyui(tmp_path: Path) -> Iterator[ComfyUI]:
    """Start a server that holds UNets in fp8 and computes in fp32, with the checkpoint and its prompts."""
    available = psutil.virtual_memory().available
    assert available >= NEEDED, f"SDXL at its width takes {NEEDED >> 30} GiB of memory, and {available >> 30} are free"
    comfy_on_path()
    import comfy.ops
    import torch

    model = TINY[NAME].make(torch, comfy.ops.disable_weight_init)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS
    server = ComfyUI(
        os.environ["COMFYUI_PATH"],
        tmp_path,
        args=("--cpu", "--fp8_e4m3fn-unet"),
        env={VARIABLE: str(tmp_path / "secret"), **PATIENCE},
    )
    save_fp8(server.base_dir / "models" / "checkpoints" / FILE, model, seed=1, prefix="model.diffusion_model.")
    for side, tokens in TOKENS.items():
        [(cond, options)] = TINY[NAME].prompt(tokens, seed=tokens)
        save_file({"cond": cond, **options}, server.input_dir / f"{NAME}-{side}.safetensors")
    save_latent(server, NAME, 1, *TINY[NAME].latent)
    with server:
        yield server


def test_sdxl_as_published_gives_the_stock_result(comfyui: ComfyUI) -> None:
    graph = graph_of(NAME, steps=1) | {"model": node("CheckpointLoaderSimple", ckpt_name=FILE)}
    ours = spread(graph, "cpu:2", cfg=2)
    ours["model"] = node("LoadParallelCheckpoint", ckpt_name=FILE, plan=["plan", 0])
    found = []
    for each in (ours, graph):
        run, log = queue_logged(comfyui, each, timeout=3000)
        found.append(saved_latent(comfyui, run.check()))
        requests.post(f"{comfyui.url}/free", json={"unload_models": True, "free_memory": True}, timeout=60)
        if each is ours:
            assert ways(log) == ["loop"]
    assert relative_error(*found) <= TOLERANCE
