"""The GPU of the dry runs notes every operation for which a host waits for a GPU. Expanding GGUF's blocks is none of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from parallel_backend.weights.formats import BLOCK_TYPES, EXPAND_VALUES
from tests.dry.fake_gpu import DEVICE, FakeGpu
from tests.support.selection import thorough

WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x.any()),
    "torch.equal": lambda x: torch.equal(x, x + 1),
    "cpu": lambda x: x.cpu(),
    "to memory that is not pinned": lambda x: torch.empty(4).copy_(x, non_blocking=True),
    "to pinned memory, blocking": lambda x: torch.empty(4, pin_memory=True).copy_(x),
    "from memory that is not pinned": lambda x: torch.zeros(4).to(DEVICE, non_blocking=True),
    "a list": lambda x: torch.tensor([1.0, 2.0], device=DEVICE),
    "new_tensor of a list": lambda x: x.new_tensor([1.0, 2.0]),
    "a number": lambda x: torch.tensor(3.0, device=DEVICE),
    "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "unique": lambda x: x.unique(),
    "an index on the host": lambda x: x[torch.tensor([0, 1])],
    "synchronize": lambda x: torch.cuda.synchronize(),
    "empty_cache": lambda x: torch.cuda.empty_cache(),
}

NO_WAITS: dict[str, Callable[[Tensor], object]] = {
    "arithmetic": lambda x: (x + 1) * x.sum(),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "arange": lambda x: torch.arange(4, device=DEVICE),
    "full": lambda x: torch.full((4,), 3.0, device=DEVICE),
    "an index on the device": lambda x: x[torch.arange(2, device=DEVICE)],
    "from pinned memory": lambda x: torch.zeros(4).pin_memory().to(DEVICE, non_blocking=True),
    "to pinned memory": lambda x: torch.empty(4, pin_memory=True).copy_(x, non_blocking=True),
}

KERNELS = {
    Type.Q8_0: 4, Type.Q6_K: 15, Type.Q5_K: 25, Type.Q5_1: 14, Type.Q5_0: 13, Type.Q4_K: 20, Type.Q4_1: 9, Type.Q4_0: 8,
    Type.Q3_K: 25, Type.Q2_K: 15,
}  # fmt: skip
"""Limits of kernels of eager operations that expand EXPAND_VALUES values. They may only decrease."""

QUICK = (Type.Q8_0, Type.Q5_0, Type.Q4_K, Type.Q6_K)
"""Types of the quick run: plain blocks, blocks with further bits, and blocks of blocks."""


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with FakeGpu().running(0, 1) as found:
        found.watch = True
        yield found


@pytest.mark.parametrize("way", [*WAITS, *NO_WAITS])
def test_the_operations_that_wait_are_noted_and_no_others(gpu: FakeGpu, way: str) -> None:
    x = torch.ones(4, device=DEVICE)
    assert not gpu.waits
    with suppress(DataDependentOutputException, DynamicOutputShapeException):  # these values end a dry run
        (WAITS | NO_WAITS)[way](x)
    assert bool(gpu.waits) == (way in WAITS)


# weights/test_formats expands each type
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, id=kind.name, marks=[thorough] * (kind not in QUICK)) for kind in BLOCK_TYPES]
)
def test_blocks_are_expanded_without_a_wait_and_within_the_limit_of_kernels(gpu: FakeGpu, kind: Type) -> None:
    storage, width = BLOCK_TYPES[kind], 1024
    for chunks in (1, 3):
        rows = torch.empty(chunks * EXPAND_VALUES // width, storage.row_bytes(width), dtype=torch.uint8, device=DEVICE)
        gpu.begin()
        values = storage.expand(rows, torch.bfloat16)
        assert values.shape == (rows.shape[0], width)
        assert gpu.begin().kernels.total() <= chunks * KERNELS[kind]
    assert not gpu.waits
