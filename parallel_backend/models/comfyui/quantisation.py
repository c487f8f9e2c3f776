"""The quantised layers of a file and their formats, as ComfyUI's own code reads them, from the file's header alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from torch import Tensor

from ...errors import Refused
from ...weights.files.checkpoint import Checkpoint, TensorEntry
from ...weights.values import values_of
from .file_values import file_values, named_values

COMFY_QUANT = "comfy_quant"

MAX_BYTES = 1 << 16
"""Largest size of a layer's settings, in bytes."""


@dataclass(frozen=True)
class Opened:
    """A file's tensors as ComfyUI's loader has them before it makes a model.

    Attributes:
        checkpoint: the file.
        tensors: the tensors on the meta device, except those that ComfyUI has made from the header.
        origins: the tensor of the file, with its name, by the tensor's `id`.
    """

    checkpoint: Checkpoint
    tensors: Mapping[str, Tensor]
    origins: Mapping[int, tuple[str, Tensor]]

    def entries(self) -> dict[int, TensorEntry]:
        """Return the file's entry of each tensor, by the tensor's `id`."""
        return {number: self.checkpoint.entries[name] for number, (name, _) in self.origins.items()}

    def pairs(self) -> Iterator[tuple[Tensor, TensorEntry]]:
        """Return the file's tensors with their entries, for `file_values`."""
        return ((tensor, self.checkpoint.entries[name]) for name, tensor in self.origins.values())

    def under(
        self, tensors: Mapping[str, Tensor], rows: Mapping[str, TensorEntry] = MappingProxyType({})
    ) -> tuple[Checkpoint, dict[str, Tensor]]:
        """Return the file with its tensors under other names, and the settings of each quantised layer.

        Args:
            tensors: the tensors under their new names.
            rows: the entries of the tensors that consist of rows of the file's tensors.

        Raises:
            Refused: a tensor is not from the file.
        """
        path = self.checkpoint.path
        entries: dict[str, TensorEntry] = {}
        quantisation: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            layer, _, last = name.rpartition(".")
            if last == COMFY_QUANT:
                quantisation[layer] = self._settings(tensor)
            elif id(tensor) in self.origins:
                entries[name] = self.checkpoint.entries[self.origins[id(tensor)][0]]
            elif name in rows:
                entries[name] = rows[name]
            else:
                raise Refused(
                    f"{path.name} has {name} in a layout that is not supported: choose a file in ComfyUI's own layout."
                )
        return replace(self.checkpoint, entries=entries), quantisation

    def _settings(self, tensor: Tensor) -> Tensor:
        """Return a layer's tensor `comfy_quant` with its values. Raise Refused if it cannot be such a tensor."""
        if id(tensor) not in self.origins:
            return tensor
        name, _ = self.origins[id(tensor)]
        entry = self.checkpoint.entries[name]
        if entry.nbytes > MAX_BYTES or entry.dtype is None:
            raise damaged(self.checkpoint, f"{entry.nbytes} bytes as {entry.storage.name}")
        return values_of(entry)


def open_checkpoint(checkpoint: Checkpoint) -> Opened:
    """Return the diffusion model's tensors in a file, with the marks of quantisation in ComfyUI's current form.

    Raises:
        Refused: the marks are damaged.
    """
    import comfy.model_detection
    import comfy.utils

    metadata = dict(checkpoint.metadata)
    try:
        every = checkpoint.meta_tensors()
        with file_values(named_values(every, checkpoint.entries)):
            tensors, _ = comfy.utils.convert_old_quants(dict(every), "", metadata=metadata)
            prefix = comfy.model_detection.unet_prefix_from_state_dict(tensors)
            inside = comfy.utils.state_dict_prefix_replace(tensors, {prefix: ""}, filter_keys=True)
            if inside:
                tensors, _ = comfy.utils.convert_old_quants(inside, "", metadata=metadata)
    except Refused:  # a value could not be read; Refused is a ValueError
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise damaged(checkpoint, error) from None
    return Opened(checkpoint, tensors, {id(tensor): (name, tensor) for name, tensor in every.items()})


def settings_of(checkpoint: Checkpoint, layer: str, comfy_quant: Tensor) -> Mapping[str, Any]:
    """Return the settings in a layer's tensor `comfy_quant`. Raise Refused if they are damaged."""
    try:
        settings = json.loads(comfy_quant.numpy().tobytes())
        if not isinstance(settings, dict) or not isinstance(settings["format"], str):
            raise ValueError(f"the settings of {layer} name no format")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(checkpoint, error) from None
    return settings


def damaged(checkpoint: Checkpoint, reason: object) -> Refused:
    """Return the error for a file whose marks of quantisation ComfyUI cannot read."""
    return Refused(f"{checkpoint.path.name} has damaged quantisation settings ({reason}); download it again.")
