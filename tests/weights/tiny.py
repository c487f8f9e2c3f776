"""A tiny model whose weights are held in several ways, a store that keeps a copy's memory, and GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor, nn

from parallel_backend.weights.stores.block_bytes import ALIGNMENT
from parallel_backend.weights.stores.replicated import ReplicatedStore
from parallel_backend.weights.stores.sharded import Sharded
from parallel_backend.weights.stores.streamed import Streamed

BLOCKS = 5
SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "scale": ((1,), torch.float32),
    "packed": ((7, 18), torch.uint8),
    "coded": ((13, 3), torch.float8_e4m3fn),
    "whole": ((5,), torch.int8),
    "weight": ((3, 5, 2), torch.bfloat16),
    "exact": ((11,), torch.float64),
}
HELD = sum(-(-torch.Size(shape).numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT for shape, dtype in SHAPES.values())


def tiny(device: str) -> nn.Module:
    """Return a model of random bytes: blocks with tensors of every kind, and one tensor outside of them."""
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Module() for _ in range(BLOCKS))
    generator = torch.Generator().manual_seed(0)
    for block in model.blocks:
        for name, (shape, dtype) in SHAPES.items():
            raw = torch.randint(0, 256, (torch.Size(shape).numel() * dtype.itemsize,), generator=generator)
            values = raw.to(torch.uint8).view(dtype).view(shape).to(device)
            block.register_parameter(name, nn.Parameter(values, requires_grad=False))
    model.outside = nn.Parameter(torch.arange(3.0).to(device), requires_grad=False)
    return model


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def fill(store: Sharded | Streamed, expected: nn.Module) -> int:
    """Copy this rank's part of each parameter of a model into a store. Return the number of bytes."""
    nbytes = 0
    for name, parameter in expected.named_parameters():
        run = store.run(name)
        run.values.copy_(parameter.view(-1)[run.start : run.stop])
        nbytes += run.values.nbytes
    return nbytes


def check(block: nn.Module, expected: nn.Module) -> None:
    """Assert that a block has the expected bits."""
    for name, value in expected.named_parameters():
        assert torch.equal(bits(getattr(block, name)).cpu(), bits(value)), name


class Keeping(ReplicatedStore):
    """A store that keeps the memory of its copy, as for copies pinned for a GPU."""

    def stay(self) -> None:
        self._idle = self._copy or self._idle
        super().stay()


def write_gguf(
    path: Path,
    tensors: Mapping[str, Tensor],
    kinds: Mapping[str, Type],
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    numbers: Mapping[str, int] | None = None,
) -> dict[str, Tensor]:
    """Write a GGUF file.

    Args:
        kinds: types of the tensors that are not fp32.
        shapes: shapes to write into fields of the header, as city96's converter does for tensors that it folds.

    Returns:
        The values that the gguf package itself expands.
    """
    writer = gguf.GGUFWriter(path, "tiny")
    for name, shape in (shapes or {}).items():
        writer.add_array(f"comfy.gguf.orig_shape.{name}", list(shape))
    for name, number in (numbers or {}).items():
        writer.add_uint16(name, number)
    values = {}
    for name, tensor in tensors.items():
        kind = kinds.get(name, Type.F32)
        data = gguf.quantize(tensor.numpy(), kind)
        values[name] = torch.from_numpy(np.array(gguf.dequantize(data, kind)))
        writer.add_tensor(name, data, raw_dtype=kind)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return values
