"""Scaled fp8 as ComfyUI marks it: the tensor that multiplies each weight.

There are two forms. Older files have a tensor `scaled_fp8`, and a `scale_weight` next to each scaled weight. Newer files hold a
`weight_scale` and name the format of each quantised layer. The name is in the header's `_quantization_metadata`, or in a small
tensor `comfy_quant` next to the weight. Scales of the layers' inputs are ignored: inputs are not quantised here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...errors import Refused
from ..formats import FLOAT8
from .entry import Checkpoint, TensorEntry

FORMATS = ("float8_e4m3fn", "float8_e5m2")
OLD_MARKER = "scaled_fp8"
METADATA = "_quantization_metadata"
COMPANIONS = ("comfy_quant", "weight_scale", "scale_weight", "input_scale", "scale_input")
MAX_MARKER_BYTES = 1 << 16


def resolve_scales(checkpoint: Checkpoint, prefix: str) -> Checkpoint:
    """Return only the model's tensors, each quantised weight with its scale.

    Args:
        checkpoint: the checkpoint, already selected by `prefix`.
        prefix: the prefix that names in the header's metadata still have.

    Raises:
        Refused: a layer is quantised in an unsupported format, or its scale does not fit.
    """
    entries, formats = checkpoint.entries, _formats(checkpoint, prefix)
    for layer, kind in formats.items():
        if kind not in FORMATS:
            raise Refused(
                f"{checkpoint.path.name} holds {layer}.weight as {kind}, which is not supported ({', '.join(FORMATS)} "
                "are): choose another file."
            )
    resolved: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        layer, _, last = name.rpartition(".")
        if name == OLD_MARKER or last in COMPANIONS:
            continue
        scale = None
        if last == "weight":
            scale = entries.get(f"{layer}.weight_scale") or entries.get(f"{layer}.scale_weight")
        resolved[name] = entry if scale is None else _with_scale(checkpoint, name, entry, scale)
    return replace(checkpoint, entries=resolved)


def _with_scale(checkpoint: Checkpoint, name: str, entry: TensorEntry, scale: TensorEntry) -> TensorEntry:
    rows = entry.shape[:1]
    if entry.dtype not in FLOAT8 or len(entry.shape) != 2:
        raise Refused(
            f"{checkpoint.path.name} holds {name} as {entry.storage.name} with a scale, which is not supported "
            f"({', '.join(FORMATS)} matrices are): choose another file."
        )
    plain = scale.dtype is not None and scale.dtype.is_floating_point and scale.dtype not in FLOAT8
    if not plain or scale.shape not in ((), (1,), (1, 1), rows, (*rows, 1)):
        raise Refused(
            f"{checkpoint.path.name} holds the scale of {name} as {scale.storage.name} with the shape "
            f"{list(scale.shape)}, where one number, or one for each row, is supported: choose another file."
        )
    return replace(entry, scale=scale)


def _formats(checkpoint: Checkpoint, prefix: str) -> Mapping[str, str]:
    """Return the format of each layer, from both places where newer files name the format."""
    formats: dict[str, str] = {}
    try:
        layers = json.loads(checkpoint.metadata.get(METADATA, "{}")).get("layers", {})
        for layer, settings in layers.items():
            if layer.startswith(prefix):
                formats[layer.removeprefix(prefix)] = str(settings["format"])
        for name, entry in checkpoint.entries.items():
            layer, _, last = name.rpartition(".")
            if last == "comfy_quant":
                formats[layer] = str(_read_settings(entry)["format"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Refused(
            f"{checkpoint.path.name} has damaged quantisation settings ({error}); download it again."
        ) from None
    return formats


def _read_settings(entry: TensorEntry) -> Mapping[str, Any]:
    if entry.nbytes > MAX_MARKER_BYTES:
        raise ValueError(f"{entry.nbytes} bytes")
    descriptor = os.open(entry.file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        settings: Mapping[str, Any] = json.loads(os.pread(descriptor, entry.nbytes, entry.offset))
    finally:
        os.close(descriptor)
    return settings
