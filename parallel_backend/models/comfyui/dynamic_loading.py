"""The dtypes in which ComfyUI holds weights if it loads a model dynamically, which it does on NVIDIA GPUs with comfy-aimdo.

Source: `ModelPatcherDynamic.load` in `comfy/model_patcher.py`. This method casts a large layer's weights to the dtype that was
chosen for weights. Weights of a small layer stay in the dtype of their file.
"""

from __future__ import annotations

import torch
from torch import nn

from ...weights.files.entry import Checkpoint
from ...weights.files.keymap import KeyMap
from ...weights.formats import FLOAT8
from ...weights.layers.packing import first_entry

SMALL_MODULE = 16 * 1024
"""The size in bytes, as in the file, of the largest layer that ComfyUI treats as small."""


def file_dtypes(module: nn.Module, checkpoint: Checkpoint, keys: KeyMap) -> dict[str, torch.dtype]:
    """Return the dtypes of the parameters that ComfyUI keeps in the dtype of their file, by the parameters' names.

    These are the parameters of small layers, and a large layer's parameters other than weight and bias. fp8 weights and blocks
    of GGUF are left out, because they stay in their format in any case.

    Args:
        module: the model, or a stage of it, on the meta device.
        checkpoint: the model's file.
        keys: the rows of the file's tensors that each parameter consists of.
    """
    dtypes: dict[str, torch.dtype] = {}
    for name, layer in module.named_modules():
        own = {key: each for key, each in layer.named_parameters(prefix=name, recurse=False) if key in keys}
        if not hasattr(layer, "comfy_cast_weights") or len(own) < len(list(layer.parameters())):
            continue
        entries = {key: first_entry(checkpoint, keys[key]) for key in own}
        size = sum(own[key].numel() * entry.storage.nbytes // entry.storage.values for key, entry in entries.items())
        for key, entry in entries.items():
            keeps_dtype = size <= SMALL_MODULE or key.rpartition(".")[2] not in ("weight", "bias")
            dtype = entry.dtype
            if keeps_dtype and dtype is not None and dtype.is_floating_point and dtype not in FLOAT8:
                dtypes[key] = dtype
    return dtypes
