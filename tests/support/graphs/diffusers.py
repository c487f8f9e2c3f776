"""Graphs and files of CogVideoX and PixArt, and the error message of a refused graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from scripts.comfyui import ComfyUI
from tests.refusals.of_flux import assert_one_sentence
from tests.support.graphs.flux import Graph, node

SEED, STEPS, CFG = 7, 4, 6.0


def family_graph(loader: str, model: str, prompts: str, latent: dict[str, Any], **settings: Any) -> Graph:
    """Return a graph with a family's loader on two workers and KSampler. The node "save" saves the latent."""
    sampler = {"sampler_name": "euler", "scheduler": "simple", "seed": SEED, "steps": STEPS, "cfg": CFG, "denoise": 1.0}
    return {
        "plan": node("ParallelPlan", devices="cpu:2", cfg=0, ulysses=0, ring=0, attention="auto"),
        "model": node(loader, unet_name=f"{model}.safetensors", weight_dtype="default", plan=["plan", 0]),
        "positive": node("LoadConditioning", conditioning=f"{prompts}-positive.safetensors"),
        "negative": node("LoadConditioning", conditioning=f"{prompts}-negative.safetensors"),
        "latent": latent,
        "sampler": node(
            settings.pop("node", "KSampler"),
            model=["model", 0],
            positive=["positive", 0],
            negative=["negative", 0],
            latent_image=["latent", 0],
            **(sampler | settings),
        ),
        "save": node("SaveLatent", samples=["sampler", 0], filename_prefix="families"),
    }


def save_gguf(source: Path, path: Path, plain: Path) -> None:
    """Write a GGUF file with the blocks' matrices as Q8_0 if their rows are long enough.

    The dequantised values go to the safetensors file `plain`.
    """
    writer = gguf.GGUFWriter(path, "tiny")
    values: dict[str, Tensor] = {}
    for name, tensor in load_file(source).items():
        kind = gguf.GGMLQuantizationType.F32
        if "blocks" in name and name.endswith("weight") and tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
        data = gguf.quantize(tensor.numpy(), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        values[name] = torch.from_numpy(np.array(gguf.dequantize(data, kind))).view(tensor.shape)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    save_file(values, plain)


def refused(comfyui: ComfyUI, graph: Graph) -> str:
    run = comfyui.queue(graph, timeout=300)
    assert run.status == "error"
    assert run.error is not None
    assert_one_sentence(run.error.exception_message)
    return run.error.exception_message
