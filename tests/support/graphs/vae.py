"""Graphs that encode and decode, by the stock VAE loader or by Load Parallel VAE."""

from __future__ import annotations

import copy
from typing import Any

import av
import numpy as np
import torch
from torch import Tensor

from scripts.comfyui import ComfyUI, Graph, QueuedRun
from tests.support.graphs.flux import node


def decode(vae: str, latent: str, decoder: str = "VAEDecode", **inputs: Any) -> Graph:
    """Return a graph with Load VAE and VAE Decode. The node "save" saves 32-bit floats."""
    return {
        "vae": node("VAELoader", vae_name=f"{vae}.safetensors"),
        "latent": node("LoadLatent", latent=f"{latent}.latent"),
        "pixels": node(decoder, samples=["latent", 0], vae=["vae", 0], **inputs),
        "save": saved(["pixels", 0]),
    }


def saved(images: list[Any]) -> dict[str, Any]:
    linear = {"format.bit_depth": "32-bit float", "format.input_color_space": "linear"}
    return node("SaveImageAdvanced", images=images, filename_prefix="vae", format="exr", **linear)


def encode(vae: str, latent: str) -> Graph:
    """Return a graph that encodes decoded pixels again, and saves both: the nodes "save" and "save pixels".

    In the parallel graph, ComfyUI decodes the pixels that are encoded.
    """
    graph = decode(vae, latent)
    return graph | {
        "save pixels": graph["save"],
        "vae of pixels": node("VAELoader", vae_name=f"{vae}.safetensors"),
        "pixels to encode": node("VAEDecode", samples=["latent", 0], vae=["vae of pixels", 0]),
        "encoded": node("VAEEncode", pixels=["pixels to encode", 0], vae=["vae", 0]),
        "save": node("SaveLatent", samples=["encoded", 0], filename_prefix="vae"),
    }


def parallel(graph: Graph, workers: int = 2, frame_batches: str = "comfyui") -> Graph:
    """Return the graph with Load Parallel VAE as its loader."""
    graph = copy.deepcopy(graph)
    graph["plan"] = node("ParallelPlan", devices=f"cpu:{workers}")
    graph["vae"]["class_type"] = "LoadParallelVAE"
    graph["vae"]["inputs"] |= {"plan": ["plan", 0], "frame_batches": frame_batches}
    return graph


def pixels(server: ComfyUI, graph: Graph) -> Tensor:
    """Run a graph and return the pixels that it saved, `[frames, 3, height, width]`."""
    return saved_pixels(server, server.queue(graph, timeout=500).check())


def saved_pixels(server: ComfyUI, run: QueuedRun, node_id: str = "save") -> Tensor:
    """Return the pixels that a node of a run saved."""
    files = server.files(run, node_id)
    assert files
    pictures = []
    for file in files:
        with av.open(str(file)) as container:
            frame = next(container.decode(video=0))
        assert frame.format.name == "gbrpf32le"
        planes = [
            np.frombuffer(memoryview(p), np.float32).reshape(p.height, p.line_size // 4)[:, : p.width]
            for p in frame.planes
        ]
        green, blue, red = (torch.from_numpy(plane.copy()) for plane in planes)
        pictures.append(torch.stack((red, green, blue)))
    result = torch.stack(pictures)
    assert 0.1 < result.mean() < 0.9  # most values are not clamped
    return result


FILES = {
    "decoder": ({"decoder.conv1.weight": torch.zeros(8, 16, 3, 3, 3)}, "no tensors of a VAE that ComfyUI knows"),
    "tiny": (
        {"decoder.1.weight": torch.zeros(256, 16, 3, 3), "decoder.22.bias": torch.zeros(3)},
        "holds a VAE of ComfyUI's class TAEHV, which is not supported on several GPUs",
    ),
    "other sizes": (
        {"decoder.1.weight": torch.zeros(8, 16, 3, 3), "decoder.22.bias": torch.zeros(12)},
        "has tensors of other sizes than ComfyUI's VAE of this kind",
    ),
    "part of wan": ({"decoder.middle.0.residual.0.gamma": torch.zeros(8, 1, 1, 1)}, "lacks the tensor"),
    "part": (
        {
            "decoder.conv_in.weight": torch.zeros(128, 16, 3, 3),
            "encoder.conv_in.weight": torch.zeros(128, 3, 3, 3),
        },
        "lacks the tensor",
    ),
}
"""Files of VAEs that are refused, each with a part of the message."""
