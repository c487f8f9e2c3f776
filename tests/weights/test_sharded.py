"""Blocks as bytes: any type, shared out over ranks that no size divides, come back bit by bit; two are whole at most."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel_backend.comm.communicator import Communicator
from parallel_backend.comm.meter import Meter
from parallel_backend.weights.block_bytes import ALIGNMENT
from parallel_backend.weights.sharded import Sharded
from tests.ranks import run_ranks

CPU = torch.device("cpu")
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
    """Blocks with tensors of every kind, and one outside of them; of random bytes."""
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


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_blocks_come_back_bit_by_bit_and_two_are_whole_at_most(ranks: int) -> None:
    expected = tiny("cpu")

    def rank(number: int) -> Any:
        meter = Meter()
        model = tiny("meta")
        sharded = Sharded(model, list(model.blocks), Communicator("weights", dist.group.WORLD, CPU, False, meter))
        said = sharded.nbytes
        sharded.materialise(CPU)
        held, whole = 0, []
        for name, parameter in expected.named_parameters():
            run = sharded.run(name)
            run.values.copy_(parameter.view(-1)[run.start : run.stop])
            held += run.values.nbytes
        for _ in range(2):
            for index in range(BLOCKS):
                with sharded.block(index):
                    whole.append(sharded.whole)
                    for name, value in expected.blocks[index].named_parameters():
                        assert torch.equal(bits(getattr(model.blocks[index], name)), bits(value)), name
            assert sharded.whole == 0
        sent = meter.sent["weights"]
        sharded.leave(True)
        for name, value in expected.named_parameters():
            assert torch.equal(bits(sharded.full(name)), bits(value)), name
        with sharded.block(3), sharded.block(0):  # out of order, so that a gather was begun for nothing
            pass
        with sharded.block(0):
            whole.append(sharded.whole)
        return held, said, whole, sent

    found = run_ranks(ranks, rank)
    size = -(-HELD // (ranks * ALIGNMENT)) * ranks * ALIGNMENT
    outside = 3 * 4
    assert sum(held for held, *_ in found) == sum(p.nbytes for p in expected.blocks.parameters()) + ranks * outside
    for _, said, whole, sent in found:
        assert sent == 2 * BLOCKS * (ranks - 1) * size // ranks
        assert said == BLOCKS * size // ranks + outside
        assert max(whole) == 2 * size


def test_two_blocks_cannot_share_a_tensor() -> None:
    shared = nn.Linear(2, 2, device="meta")
    model = nn.Sequential(shared, nn.Sequential(shared))
    with pytest.raises(AssertionError, match=r"two blocks share 0\.weight"):
        Sharded(model, list(model), Communicator("weights", None, CPU, False, Meter()))
