"""Which layers of a file are quantised, and how: ComfyUI's own reading of it, on the header alone."""

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
"""Of a layer's settings."""


@dataclass(frozen=True)
class Opened:
    """A file's tensors as ComfyUI's loader has them before it makes a model.

    `tensors` are on the meta device, but for those that ComfyUI has made of the header; `origins` says by identity which of the
    file's each was.
    """

    checkpoint: Checkpoint
    tensors: Mapping[str, Tensor]
    origins: Mapping[int, tuple[str, Tensor]]

    def entries(self) -> dict[int, TensorEntry]:
        """Where each of the tensors lies in the file, by its identity."""
        return {number: self.checkpoint.entries[name] for number, (name, _) in self.origins.items()}

    def pairs(self) -> Iterator[tuple[Tensor, TensorEntry]]:
        """The file's tensors and where they lie in it, for `file_values`."""
        return ((tensor, self.checkpoint.entries[name]) for name, tensor in self.origins.values())

    def under(
        self, tensors: Mapping[str, Tensor], rows: Mapping[str, TensorEntry] = MappingProxyType({})
    ) -> tuple[Checkpoint, dict[str, Tensor]]:
        """The file's tensors under other names, and by layer what it says of quantisation.

        Args:
            rows: of those tensors that are made of rows of the file's, which.

        Raises:
            Refused: a tensor is none of the file's.
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
        """A layer's tensor `comfy_quant` with its values. Raises Refused where it cannot be one."""
        if id(tensor) not in self.origins:
            return tensor
        name, _ = self.origins[id(tensor)]
        entry = self.checkpoint.entries[name]
        if entry.nbytes > MAX_BYTES or entry.dtype is None:
            raise damaged(self.checkpoint, f"one of {entry.nbytes} bytes as {entry.storage.name}")
        return values_of(entry)


def open_checkpoint(checkpoint: Checkpoint) -> Opened:
    """The diffusion model's tensors in a file, what it says of quantisation in ComfyUI's present form.

    Raises:
        Refused: that is damaged.
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
    except Refused:  # a value could not be read; it is a ValueError
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise damaged(checkpoint, error) from None
    return Opened(checkpoint, tensors, {id(tensor): (name, tensor) for name, tensor in every.items()})


def settings_of(checkpoint: Checkpoint, layer: str, comfy_quant: Tensor) -> Mapping[str, Any]:
    """What a layer's tensor says. Raises Refused where it is damaged."""
    try:
        settings = json.loads(comfy_quant.numpy().tobytes())
        if not isinstance(settings, dict) or not isinstance(settings["format"], str):
            raise ValueError(f"that of {layer} names no format")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(checkpoint, error) from None
    return settings


def damaged(checkpoint: Checkpoint, reason: object) -> Refused:
    """The refusal of a file whose marks of quantisation say nothing that ComfyUI takes."""
    return Refused(f"{checkpoint.path.name} has damaged marks of quantisation ({reason}); download it again.")
