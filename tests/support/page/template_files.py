"""Files under the names that ComfyUI's own templates load: real headers without data, tiny VAEs, and what is no model."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.template_graphs import Node
from benchmarks.template_models import SIZES, class_of, file_of
from parallel_backend.models.comfyui.comfy_family import make
from tests.support.comfy_oracle import comfy_on_path
from tests.vae.comfy_vaes import save_image_vae

FOLDERS: Mapping[str, str] = {"UNETLoader": "diffusion_models", "VAELoader": "vae"}
"""Of the loaders whose files are put in place, where ComfyUI looks for them."""


def put_files(models: Path, graph: Mapping[str, Node]) -> None:
    """Put the files of a template's loaders where there are none: of each class one, under all of its names."""
    for node in graph.values():
        if node.kind in FOLDERS:
            path = models / FOLDERS[node.kind] / file_of(node.widgets).replace("\\", "/")
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                os.link(_file(models / "of templates", node), path)


def _file(folder: Path, node: Node) -> Path:
    kind = "VAE" if node.kind == "VAELoader" else class_of(file_of(node.widgets)) or ""
    folder.mkdir(exist_ok=True)
    path = folder / f"{kind}.safetensors"
    if path.exists():
        return path
    if kind == "VAE":
        return save_image_vae(path)
    if kind in SIZES:
        return write_header(path, kind)
    save_file({"no model": torch.zeros(1)}, path)
    return path


def write_header(path: Path, model: str) -> Path:
    """A safetensors file without data of a model that `SIZES` has: a hole in the disk."""
    comfy_on_path()
    import comfy.supported_models

    kind = getattr(comfy.supported_models, model.partition(" ")[0])
    base = make(kind(dict(SIZES[model])), {}, torch.bfloat16)
    header: dict[str, Any] = {}
    end = 0
    for key, tensor in base.diffusion_model.state_dict().items():
        header[key] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [end, end + 2 * tensor.numel()]}
        end += 2 * tensor.numel()
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return path
