"""Files of ComfyUI's small text encoders at their own sizes, with random weights."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from parallel_backend.models.comfyui.reduced import repeated
from tests.support.comfy_oracle import comfy_on_path

ENCODERS: Mapping[str, tuple[Callable[[], Any], torch.dtype]] = MappingProxyType(
    {
        "clip-l": (lambda: import_module("comfy.sd1_clip").SD1ClipModel, torch.float16),
        "t5-base": (lambda: import_module("comfy.text_encoders.sa_t5").SAT5Model, torch.float32),
        "qwen3-0.6b": (lambda: import_module("comfy.text_encoders.anima").te(), torch.bfloat16),
        "qwen3.5-0.8b": (
            lambda: import_module("comfy.text_encoders.qwen35").te(model_type="qwen35_08b"),
            torch.bfloat16,
        ),
    }
)
"""ComfyUI's class of each text encoder, and the dtype of its file."""

FILED = {"qwen3.5-0.8b": {"model.": "model.language_model.", "visual.": "model.visual."}}
"""The beginnings of tensors' names in the files of encoders whose classes have others."""


def save_text_encoder(path: Path, name: str, seed: int = 0) -> None:
    """Write the file of a text encoder with random weights."""
    comfy_on_path()
    make, dtype = ENCODERS[name]
    encoder = make()(device="meta", dtype=dtype)
    tensors = {}
    for key, tensor in _random(next(encoder.children()).transformer, dtype, seed):
        begins = next((each for each in FILED.get(name, {}) if key.startswith(each)), "")
        filed = FILED[name][begins] + key.removeprefix(begins) if begins else key
        tensors[filed] = tensor
    save_file(tensors, path)


NARROW: Mapping[str, tuple[str, dict[str, int]]] = MappingProxyType(
    {
        "clip-g": ("comfy/clip_config_bigg.json", {"intermediate_size": 64}),
        "t5-xxl": ("comfy/text_encoders/t5_config_xxl.json", {"d_ff": 64, "num_heads": 4}),
    }
)
"""ComfyUI's file of the sizes of a large text encoder, and smaller sizes by which ComfyUI still recognises the encoder."""


def narrow_sizes(name: str) -> dict[str, Any]:
    """Return the smaller sizes of a text encoder, in the form of ComfyUI's file."""
    file, smaller = NARROW[name]
    sizes: dict[str, Any] = json.loads((Path(os.environ["COMFYUI_PATH"]) / file).read_text(encoding="utf-8"))
    assert sizes.keys() >= smaller.keys()
    return sizes | smaller


def save_narrow(path: Path, name: str) -> None:
    """Write the fp16 file of a large text encoder of smaller sizes, with random weights."""
    comfy_on_path()
    import comfy.clip_model
    import comfy.ops
    from comfy.text_encoders import t5

    make = comfy.clip_model.CLIPTextModel if name == "clip-g" else t5.T5
    module = make(narrow_sizes(name), dtype=torch.float16, device="meta", operations=comfy.ops.disable_weight_init)
    save_file(dict(_random(module, torch.float16, seed=0)), path)


def _random(module: Any, dtype: torch.dtype, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield a random tensor for each tensor of a module, by its name."""
    generator = torch.Generator().manual_seed(seed)
    for key, tensor in module.state_dict().items():
        noise = 0.02 * repeated(tensor.shape, generator)
        yield key, (noise if tensor.ndim > 1 else noise + 1).to(dtype)


def save_scaled_fp8(path: Path, name: str) -> None:
    """Write the file of a text encoder whose blocks' matrices are fp8 with a scale, as ComfyUI's converters write it."""
    save_text_encoder(path, name)
    tensors = load_file(path)
    settings = torch.tensor([*json.dumps({"format": "float8_e4m3fn"}).encode()], dtype=torch.uint8)
    for key in [key for key in tensors if ".layers." in key and key.endswith("_proj.weight")]:
        scale = tensors[key].float().abs().max() / 448
        tensors[key] = (tensors[key].float() / scale).to(torch.float8_e4m3fn)
        tensors[key.replace(".weight", ".weight_scale")] = scale
        tensors[key.replace(".weight", ".comfy_quant")] = settings.clone()
    save_file(tensors, path)
