"""Creates files with the names that ComfyUI's templates load: real headers without data, tiny VAEs, and files with no model."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.template_graphs import Node
from benchmarks.template_models import SIZES, class_of, file_of
from parallel_backend.models.comfyui.meta_model import make_model
from tests.support.comfy_oracle import comfy_on_path
from tests.support.tiny.unsharded import UNSHARDED
from tests.vae.comfy_vaes import save_image_vae

FOLDERS: Mapping[str, str] = {
    "UNETLoader": "diffusion_models",
    "CheckpointLoaderSimple": "checkpoints",
    "VAELoader": "vae",
}
"""Loaders whose files are created, with the model folder where ComfyUI looks for those files."""

UNETS: Mapping[str, str] = {"SD15": "sd15", "SDXL": "sdxl", "SDXLRefiner": "sdxl_refiner", "LotusD": "lotus"}
"""Classes that run unsharded, with the names of their small models."""


def put_files(models: Path, graph: Mapping[str, Node]) -> None:
    """Create the missing files of a template's loaders: one file for each class, linked under all of its names."""
    for node in graph.values():
        if node.kind in FOLDERS:
            path = models / FOLDERS[node.kind] / file_of(node.widgets).replace("\\", "/")
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                os.link(_file(models / "of templates", node), path)


def _file(folder: Path, node: Node) -> Path:
    kind = "VAE" if node.kind == "VAELoader" else class_of(file_of(node.widgets)) or ""
    prefix = "model.diffusion_model." if node.kind == "CheckpointLoaderSimple" else ""
    folder.mkdir(exist_ok=True)
    path = folder / f"{prefix}{kind}.safetensors"
    if path.exists():
        return path
    if kind == "VAE":
        return save_image_vae(path)
    if kind in SIZES or kind in UNETS:
        return _write_header(path, _state_dict(kind), prefix)
    save_file({"no model": torch.zeros(1)}, path)
    return path


def _state_dict(model: str) -> Mapping[str, Tensor]:
    comfy_on_path()
    import comfy.ops
    import comfy.supported_models

    if model in UNETS:
        unet: Mapping[str, Tensor] = UNSHARDED[UNETS[model]].make(None, comfy.ops.disable_weight_init).state_dict()
        return unet
    kind = getattr(comfy.supported_models, model.partition(" ")[0])
    transformer: Mapping[str, Tensor] = make_model(
        kind(dict(SIZES[model])), {}, torch.bfloat16
    ).diffusion_model.state_dict()
    return transformer


def _write_header(path: Path, state_dict: Mapping[str, Tensor], prefix: str) -> Path:
    """Write a safetensors file without data, as a sparse file."""
    header: dict[str, Any] = {}
    end = 0
    for key, tensor in state_dict.items():
        begin, end = end, end + 2 * tensor.numel()
        header[prefix + key] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return path
