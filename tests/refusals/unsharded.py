"""Graphs of unsharded models that are refused, and their sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from scripts.comfyui import ComfyUI
from tests.refusals.kinds import Refusals, literally
from tests.support.graphs.comfyui import graph_of, save_latent, spread
from tests.support.graphs.family_tests import save_with_prompts
from tests.support.graphs.flux import Graph, controlled, node
from tests.support.tiny.controlnet import save_of_unet

AT_MOST = "this model is split by prompts and batches only: with a batch of 1 it uses two GPUs at most"

PLANS: Mapping[str, tuple[dict[str, Any], str]] = {
    "four workers for a picture": (
        {"devices": "cpu:4"},
        f"devices 'cpu:4' has 4 workers, but {AT_MOST}; use 2 devices, or a larger batch.",
    ),
    "data of other devices": (
        {"devices": "cpu:3", "data": 1, "cfg": 2},
        "devices 'cpu:3' has 3 workers, but this model is split by prompts and batches only: with data 1 and cfg 2 it uses two "
        "GPUs at most; use 2 devices.",
    ),
    "too few devices": (
        {"devices": "cpu:1", "data": 1, "cfg": 2},
        "data 1 x cfg 2 needs 2 workers or a multiple of that, but devices 'cpu:1' has 1: use data 0 and cfg 0 (automatic), or "
        "more devices.",
    ),
    **{
        name: ({name: 2}, f"{name} 2 cannot be used, because {AT_MOST}; use {name} 1, and cfg or data.")
        for name in ("ulysses", "ring", "pipefusion", "patches")
    },
    "stages": ({"stages": "1"}, f"stages '1' cannot be used, because {AT_MOST}; leave it empty."),
    "sharded": (
        {"weights": "sharded"},
        "weights sharded cannot be used with this model, because each GPU runs the whole model: use weights replicated, or "
        "smaller weights (fp8, GGUF).",
    ),
    "attention": (
        {"attention": "sdpa"},
        "attention sdpa cannot be used with this model, which runs with ComfyUI's own attention: use attention auto.",
    ),
}


def no_negative() -> tuple[Graph, str]:
    """Return a graph of a picture without a negative branch, on four workers."""
    return spread(graph_of("sd15", cfg=1.0), "cpu:4"), (
        "devices 'cpu:4' has 4 workers, but this model is split by prompts and batches only: with a batch of 1 and no negative "
        "prompt it uses one GPU at most; use 1 device, or a larger batch."
    )


def sound() -> tuple[Graph, str]:
    """Return a graph with a latent of sound."""
    graph = graph_of("sd15") | {"latent": node("EmptyLatentAudio", seconds=5.0, batch_size=1)}
    return spread(
        graph
    ), "the latent has the shape [1, 4, 221184] and SD15 takes [batch, 4, height, width], none of them 0"


def other_text() -> tuple[Graph, str]:
    """Return a graph with the text of another model."""
    graph = graph_of("sd15")
    graph["positive"]["inputs"]["conditioning"] = "hunyuan3d21-positive.safetensors"
    return spread(graph), "the conditioning's text is of the shape [1, 7, 1024] and SD15 takes a width of 768"


def swapped() -> tuple[Graph, str]:
    """Return a graph of a class that swaps the halves of a batch."""
    graph = graph_of("hunyuan3d21")
    return spread(graph, cfg=2), "a Hunyuan3Dv2_1 model computes the rows of a batch together"


def other_control() -> tuple[Graph, str]:
    """Return a graph with a ControlNet of a model with more blocks."""
    graph = graph_of("inpaint") | {
        "net": node("ControlNetLoader", control_net_name="refused-sd15.safetensors"),
        "image": node("EmptyImage", width=112, height=72, batch_size=1, color=0x4080C0),
    }
    said = (
        "the ControlNet gives tensors of [1, 320, 5, 7] for the [1, 320, 9, 14] of middle blocks of this model: use a ControlNet "
        "that was made for this model."
    )
    return spread(controlled(graph), strict=False), said


def zero123() -> tuple[Graph, str]:
    """Return a graph with a checkpoint in which a tensor outside the diffusion model makes it another model."""
    graph = spread(graph_of("ip2p"))
    graph["model"] = node("LoadParallelCheckpoint", ckpt_name="refused-zero123.safetensors", plan=["plan", 0])
    return graph, (
        "refused-zero123.safetensors is a Stable_Zero123 checkpoint, but ComfyUI takes its diffusion model alone for a "
        "SD15_instructpix2pix, so the workers cannot run it: use Load Checkpoint."
    )


def save(server: ComfyUI) -> None:
    """Write the models and prompts that these graphs need."""
    for name in ("sd15", "hunyuan3d21", "inpaint"):
        save_with_prompts(server, name)
    save_zero123(server)
    save_of_unet(server.base_dir / "models" / "controlnet" / "refused-sd15.safetensors")
    save_latent(server, "sd15", 1, 4, 9, 14)


def save_zero123(server: ComfyUI) -> None:
    """Write a checkpoint in which a tensor outside the diffusion model makes it another model."""
    save_with_prompts(server, "ip2p")
    tensors = load_file(server.base_dir / "models" / "diffusion_models" / "ip2p.safetensors")
    full = {f"model.diffusion_model.{name}": tensor for name, tensor in tensors.items()}
    beside = {"cc_projection.weight": torch.zeros(768, 772), "cc_projection.bias": torch.zeros(768)}
    (server.base_dir / "models" / "checkpoints").mkdir(exist_ok=True)
    save_file(full | beside, server.base_dir / "models" / "checkpoints" / "refused-zero123.safetensors")


def whole(server: ComfyUI) -> Refusals:
    """Yield all refused graphs of unsharded models."""
    save(server)
    for plan, said in PLANS.values():
        yield spread(graph_of("sd15"), **plan), literally(said)
    for graph, said in (no_negative(), sound(), other_text(), swapped(), other_control(), zero123()):
        yield graph, literally(said)
