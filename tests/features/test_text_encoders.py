"""Load Parallel CLIP in a real ComfyUI gives the same conditioning as ComfyUI's own loaders, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from scripts.comfyui import ComfyUI, Graph
from tests.support.graphs.flux import node
from tests.support.tiny.text_encoders import ENCODERS, save_text_encoder

TYPES = {"clip-l": "stable_diffusion", "t5-base": "stable_audio", "qwen3-0.6b": "qwen_image"}
"""The type to load each text encoder with."""

PROMPT = "a (red:1.3) fox jumps over a lazy dog, oil on canvas"


@pytest.fixture(scope="module")
def server(comfyui: ComfyUI) -> ComfyUI:
    """Provide a ComfyUI with the files of small text encoders."""
    folder = comfyui.base_dir / "models" / "text_encoders"
    folder.mkdir(exist_ok=True)
    for name in ENCODERS:
        save_text_encoder(folder / f"{name}.safetensors", name)
    return comfyui


def encoding(loader: dict[str, Any], prompt: str = PROMPT) -> Graph:
    """Return a graph that encodes a prompt and saves the conditioning."""
    return {
        "clip": loader,
        "text": node("CLIPTextEncode", clip=["clip", 0], text=prompt),
        "save": node("SaveConditioning", conditioning=["text", 0], filename_prefix="text"),
    }


def parallel(graph: Graph, workers: int) -> Graph:
    """Return the graph with Load Parallel CLIP as its loader."""
    changed = {**graph, "plan": node("ParallelPlan", devices=f"cpu:{workers}")}
    changed["clip"] = node("LoadParallelCLIP", **graph["clip"]["inputs"], plan=["plan", 0])
    return changed


def conditioning(server: ComfyUI, graph: Graph) -> dict[str, Tensor]:
    """Return the conditioning that a graph saves."""
    (saved,) = server.queue(graph, timeout=500).check().outputs["save"]["conditioning"]
    return load_file(server.input_dir / saved["filename"])


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("name", ENCODERS)
def test_prompts_are_encoded_bit_by_bit_as_by_comfyuis_loader(server: ComfyUI, name: str, workers: int) -> None:
    graph = encoding(node("CLIPLoader", clip_name=f"{name}.safetensors", type=TYPES[name]))
    ours, theirs = conditioning(server, parallel(graph, workers)), conditioning(server, graph)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert theirs["cond"].std() > 0.01
