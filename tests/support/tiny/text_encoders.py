"""Files of ComfyUI's small text encoders at their own sizes, with random weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.comfy_oracle import comfy_on_path


def _clip_l() -> Any:
    import comfy.sd1_clip

    return comfy.sd1_clip.SD1ClipModel


def _t5_base() -> Any:
    import comfy.text_encoders.sa_t5

    return comfy.text_encoders.sa_t5.SAT5Model


def _qwen3() -> Any:
    import comfy.text_encoders.anima

    return comfy.text_encoders.anima.te()


def _qwen35() -> Any:
    import comfy.text_encoders.qwen35

    return comfy.text_encoders.qwen35.te(model_type="qwen35_08b")


ENCODERS: Mapping[str, tuple[Callable[[], Any], torch.dtype]] = MappingProxyType(
    {
        "clip-l": (_clip_l, torch.float16),
        "t5-base": (_t5_base, torch.float32),
        "qwen3-0.6b": (_qwen3, torch.bfloat16),
        "qwen3.5-0.8b": (_qwen35, torch.bfloat16),
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
    transformer = next(encoder.children()).transformer
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for key, tensor in transformer.state_dict().items():
        noise = 0.02 * torch.randn(tensor.shape, generator=generator)
        begins = next((each for each in FILED.get(name, {}) if key.startswith(each)), "")
        filed = FILED[name][begins] + key.removeprefix(begins) if begins else key
        tensors[filed] = (noise if tensor.ndim > 1 else noise + 1).to(dtype)
    save_file(tensors, path)


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
