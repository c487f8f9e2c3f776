"""Filling a module from a checkpoint, parameter by parameter, by byte range."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

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
            local, wanted = _local_rows(parameter)
            offset = 0
            for piece in keys[name]:
                rows = piece.stop - piece.start
                begin, end = max(offset, wanted.start), min(offset + rows, wanted.stop)
                if begin < end:
                    source = slice(piece.start + begin - offset, piece.start + end - offset)
                    reader.read_rows(piece.name, source, local[begin - wanted.start : end - wanted.start])
                offset += rows
            assert offset == parameter.shape[0], f"{name} was given {offset} rows of {parameter.shape[0]}"


def _local_rows(parameter: nn.Parameter) -> tuple[Tensor, slice]:
    """What this rank holds of a parameter and which rows that is: all, or an FSDP shard (cut as torch.chunk does)."""
    if not isinstance(parameter.data, DTensor):
        return parameter.data, slice(0, parameter.shape[0])
    local = parameter.data.to_local()
    mesh = parameter.data.device_mesh
    chunk = -(-parameter.shape[0] // mesh.size())
    start = min(mesh.get_local_rank() * chunk, parameter.shape[0])
    return local, slice(start, start + local.shape[0])
