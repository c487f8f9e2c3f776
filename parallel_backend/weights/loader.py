"""Filling a module from a checkpoint, parameter by parameter, by byte range."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from .checkpoint import Checkpoint, CheckpointReader
from .keymap import KeyMap


def load_weights(module: nn.Module, checkpoint: Checkpoint, keys: KeyMap, on_bytes: Callable[[int], None]) -> None:
    """Fill every parameter of a materialised module.

    Args:
        module: its parameters have their final dtype and device.
        checkpoint: the file's header, names without prefix.
        keys: which rows of which tensors make each parameter.
        on_bytes: called with the number of bytes after each piece read.

    Raises:
        OSError: the file cannot be read.
    """
    with CheckpointReader(checkpoint, on_bytes) as reader, torch.no_grad():
        for name, parameter in module.named_parameters():
            done = 0
            for piece in keys[name]:
                rows = piece.stop - piece.start
                reader.read_rows(piece.name, slice(piece.start, piece.stop), parameter.data[done : done + rows])
                done += rows
            assert done == parameter.shape[0], f"{name} was given {done} rows of {parameter.shape[0]}"
