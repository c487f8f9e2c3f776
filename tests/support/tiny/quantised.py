"""Quantised files in the formats of ComfyUI's own quantisers (comfy_kitchen)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.comfy_oracle import comfy_on_path

comfy_on_path()

from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor  # noqa: E402

GROUP = 64
"""Number of values that ConvRot rotates together: a power of 4 that divides the tiny models' widths."""

NEWER = "asym_w4a8_int8" in QUANT_ALGOS
"""True if ComfyUI is of version 0.33 or newer."""

FORMATS: Mapping[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "fp8": ("float8_e4m3fn", {"scale": "recalculate"}, {}),
    "fp8_e5m2": ("float8_e5m2", {"scale": "recalculate"}, {}),
    "nvfp4": ("nvfp4", {}, {}),
    "mxfp8": ("mxfp8", {}, {}),
    "int8": ("int8_tensorwise", {}, {}),
    "int8_rows": ("int8_tensorwise", {"per_channel": True}, {}),
    "int8_convrot": (
        "int8_tensorwise",
        {"per_channel": True, "convrot": True, "convrot_groupsize": GROUP},
        {"convrot": True, "convrot_groupsize": GROUP},
    ),
    "w4a4": ("convrot_w4a4", {"convrot_groupsize": GROUP}, {"convrot_groupsize": GROUP}),
    **({"w4a8": ("asym_w4a8_int8", {"convrot_groupsize": GROUP}, {"convrot_groupsize": GROUP})} if NEWER else {}),
    **({"nvfp4_smoothed": ("nvfp4", {}, {})} if "pre_quant_scale" in QUANT_ALGOS["nvfp4"]["parameters"] else {}),
}
"""The quantised forms by name: ComfyUI's name of the format, the quantiser's arguments, and the mark's other entries."""


def save_quantised(
    path: Path,
    tensors: Mapping[str, Tensor],
    form: str,
    input_scale: float | None = None,
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """Write the blocks' matrices in a format, and the other tensors unchanged."""
    name, told, said = FORMATS[form]
    mark = torch.tensor(list(json.dumps({"format": name} | said).encode()), dtype=torch.uint8)
    stored: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        layer, _, last = key.rpartition(".")
        if "blocks" not in key or last != "weight" or tensor.ndim != 2:
            stored[key] = tensor
            continue
        made = QuantizedTensor.from_float(tensor, QUANT_ALGOS[name]["comfy_tensor_layout"], **told)
        stored |= made.state_dict(key) | {f"{layer}.comfy_quant": mark.clone()}
        if form == "nvfp4_smoothed":
            stored[f"{layer}.pre_quant_scale"] = torch.linspace(0.5, 2.0, tensor.shape[1])
        if input_scale is not None:
            stored[f"{layer}.input_scale"] = torch.tensor(input_scale)
    save_file(stored, path, metadata=dict(metadata) or None)
    return path
