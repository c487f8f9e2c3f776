"""Which layers of a file are quantised, and how: ComfyUI's own reading of it, on the header alone."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ...errors import Refused
from ...weights.files.checkpoint import Checkpoint, Entry

COMFY_QUANT = "comfy_quant"
READ = (COMFY_QUANT, "scale_input")
"""Small tensors that ComfyUI looks into."""

MAX_BYTES = 1 << 16


@dataclass(frozen=True)
class Opened:
    """A file's tensors as ComfyUI's loader has them before it makes a model.

    `tensors` are on the meta device, but for those of READ; `origins` says by identity which of the file's each was.
    """

    checkpoint: Checkpoint
    tensors: Mapping[str, Tensor]
    origins: Mapping[int, tuple[str, Tensor]]

    def entries(self) -> dict[int, Entry]:
        """Where each of the tensors lies in the file, by its identity."""
        return {number: self.checkpoint.entries[name] for number, (name, _) in self.origins.items()}

    def under(
        self, tensors: Mapping[str, Tensor], rows: Mapping[str, Entry] = MappingProxyType({})
    ) -> tuple[Checkpoint, dict[str, Tensor]]:
        """The file's tensors under other names, and by layer what it says of quantisation.

        Args:
            rows: of those tensors that are made of rows of the file's, which.

        Raises:
            Refused: a tensor is none of the file's.
        """
        path = self.checkpoint.path
        entries: dict[str, Entry] = {}
        quantisation: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            layer, _, last = name.rpartition(".")
            if last == COMFY_QUANT:
                quantisation[layer] = tensor
            elif id(tensor) in self.origins:
                entries[name] = self.checkpoint.entries[self.origins[id(tensor)][0]]
            elif name in rows:
                entries[name] = rows[name]
            else:
                raise Refused(
                    f"{path.name} has {name} in a layout that is not supported: choose a file in ComfyUI's own layout."
                )
        return replace(self.checkpoint, entries=entries), quantisation


def open_checkpoint(checkpoint: Checkpoint) -> Opened:
    """The diffusion model's tensors in a file, what it says of quantisation in ComfyUI's present form.

    Raises:
        Refused: that is damaged.
    """
    import comfy.model_detection
    import comfy.utils

    metadata = dict(checkpoint.metadata)
    try:
        quantisation = {
            name: _read(entry) for name, entry in checkpoint.entries.items() if name.rpartition(".")[2] in READ
        }
        every = checkpoint.meta_tensors() | quantisation
        tensors, _ = comfy.utils.convert_old_quants(dict(every), "", metadata=metadata)
        prefix = comfy.model_detection.unet_prefix_from_state_dict(tensors)
        inside = comfy.utils.state_dict_prefix_replace(tensors, {prefix: ""}, filter_keys=True)
        if inside:
            tensors, _ = comfy.utils.convert_old_quants(inside, "", metadata=metadata)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise Refused(
            f"{checkpoint.path.name} has damaged marks of quantisation ({error}); download it again."
        ) from None
    return Opened(checkpoint, tensors, {id(tensor): (name, tensor) for name, tensor in every.items()})


def settings_of(checkpoint: Checkpoint, layer: str, comfy_quant: Tensor) -> Mapping[str, Any]:
    """What a layer's tensor says. Raises Refused where it is damaged."""
    try:
        settings = json.loads(comfy_quant.numpy().tobytes())
        if not isinstance(settings, dict) or not isinstance(settings["format"], str):
            raise ValueError(f"that of {layer} names no format")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refused(
            f"{checkpoint.path.name} has damaged marks of quantisation ({error}); download it again."
        ) from None
    return settings


def _read(entry: Entry) -> Tensor:
    """A small tensor's values."""
    if entry.nbytes > MAX_BYTES:
        raise ValueError(f"one of {entry.nbytes} bytes")
    if entry.dtype is None:
        raise ValueError(f"one of {entry.storage.name}")
    descriptor = os.open(entry.file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.pread(descriptor, entry.nbytes, entry.offset)
    finally:
        os.close(descriptor)
    if len(data) < entry.nbytes:
        raise ValueError("one that ends early")
    if not data:
        return torch.empty(entry.shape, dtype=entry.dtype)
    return torch.frombuffer(bytearray(data), dtype=entry.dtype).view(entry.shape)
