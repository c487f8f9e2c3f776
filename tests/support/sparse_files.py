"""Writes model files of real size that take no room on the disk."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor


def write_sparse(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Path:
    """Write a safetensors file in bf16 with the names and shapes of these tensors; all of its values are zero."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for key, tensor in tensors.items():
        begin, end = end, end + 2 * tensor.numel()
        header[key] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return path
