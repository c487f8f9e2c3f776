"""Random models of ComfyUI's own classes, small enough for two CPU cores, and prompts for them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.comfy_oracle import comfy_on_path
from tests.support.tiny import families
from tests.support.tiny.families.wide import WIDE
from tests.support.tiny.family import Tiny
from tests.support.tiny.models import draw, randomise
from tests.support.tiny.unsharded import UNSHARDED


def save_tiny(folder: Path, name: str, seed: int | None = None) -> Path:
    """Write a family's model. The default seed is the length of the name."""
    comfy_on_path()
    import comfy.ops

    model = TINY[name].make(torch, comfy.ops.disable_weight_init)
    seed = len(name) if seed is None else seed
    path = folder / f"{name}.safetensors"
    if next(model.parameters()).is_meta:
        return save_fp8(path, model, seed)
    randomise(model, seed)
    save_file({key: tensor.contiguous() for key, tensor in model.state_dict().items()}, path, TINY[name].metadata)
    return path


def save_wide(folder: Path, name: str) -> Path:
    """Write a model of a family for which ComfyUI assumes the real width: one block of a kind, in fp8."""
    comfy_on_path()
    import comfy.ops

    return save_fp8(folder / f"{name}.safetensors", WIDE[name](comfy.ops.disable_weight_init), seed=len(name))


def save_unread(folder: Path, name: str, **settings: Any) -> Path:
    """Write a model of `WIDE` without data, named `NAME-unread`, for tests that read no weight."""
    comfy_on_path()
    import comfy.ops

    return save_header(folder / f"{name}-unread.safetensors", WIDE[name](comfy.ops.disable_weight_init, **settings))


def save_header(path: Path, model: Any, kind: str = "F8_E4M3", nbytes: int = 1) -> Path:
    """Write a safetensors file of a model whose data is a hole in the file: no weight takes room on the disk.

    Args:
        kind: the dtype in the file's header.
        nbytes: bytes of one number of this dtype.
    """
    header: dict[str, Any] = {}
    end = 0
    for key, tensor in model.state_dict().items():
        begin, end = end, end + nbytes * tensor.numel()
        header[key] = {"dtype": kind, "shape": [*tensor.shape], "data_offsets": [begin, end]}
    content = json.dumps(header).encode()
    path.write_bytes(len(content).to_bytes(8, "little") + content)
    os.truncate(path, path.stat().st_size + end)
    return path


def save_fp8(path: Path, model: Any, seed: int, prefix: str = "") -> Path:
    """Write a model on the meta device with random weights in fp8, and vectors in bf16.

    The same million numbers repeat, because drawing hundreds of millions takes long.

    Args:
        prefix: the prefix of the tensors' names.
    """
    drawn = draw(1_000_003, seed=seed)  # a prime, so that no two rows are equal
    tensors: dict[str, Tensor] = {}
    for key, parameter in model.state_dict().items():
        count = parameter.numel()
        values = drawn.repeat(-(-count // len(drawn)))[:count].view(parameter.shape)
        if parameter.ndim == 1:
            tensors[prefix + key] = (1 + 0.2 * values if key.endswith("weight") else 0.1 * values).bfloat16()
        else:
            tensors[prefix + key] = (values / parameter.shape[1] ** 0.5).to(torch.float8_e4m3fn)
    path.parent.mkdir(exist_ok=True)
    save_file(tensors, path)
    return path


FAMILIES = [import_module(f"{families.__name__}.{each.name}") for each in iter_modules(families.__path__)]
"""The modules of the families' folder. One has no such table, because its models are only made at their real width."""

TINY: Mapping[str, Tiny] = {
    **UNSHARDED,
    **{name: tiny for family in FAMILIES for name, tiny in getattr(family, "TINY", {}).items()},
}
