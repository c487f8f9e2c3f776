"""How a rank holds the weights of its blocks: whole, or a shard of each that is gathered for the time of use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from ..comm.meter import Meter


class Holding(Protocol):
    """Makes the weights of a block usable."""

    def block(self, index: int) -> AbstractContextManager[None]:
        """While inside, the block's parameters are whole."""


class Replicated:
    """Every rank holds its blocks whole."""

    def block(self, index: int) -> AbstractContextManager[None]:
        """Nothing to do."""
        return nullcontext()


class Sharded:
    """Each rank holds 1/N of every block (torch's FSDP2); the next block's gather is in flight during this one's work.

    Args:
        blocks: on the meta device; they become FSDP modules.
        mesh: all ranks.
        meter: counts the gathers' bytes.
    """

    def __init__(self, blocks: Sequence[nn.Module], mesh: DeviceMesh, meter: Meter) -> None:
        self._blocks: list[FSDPModule] = [fully_shard(block, mesh=mesh) for block in blocks]  # type: ignore[misc]
        self._sent = [(mesh.size() - 1) * _shard_bytes(block) for block in blocks]
        self._meter = meter
        self._coming: dict[int, object] = {}

    @contextmanager
    def block(self, index: int) -> Iterator[None]:
        """Gather the block, begin the next one's gather, and free it afterwards."""
        self._begin(index)
        handle = self._coming.pop(index)
        if index + 1 < len(self._blocks):
            self._begin(index + 1)
        with self._meter.wait("weights"):
            if handle is not None:
                handle.wait()  # type: ignore[attr-defined]
        yield
        self._blocks[index].reshard()

    def _begin(self, index: int) -> None:
        if index in self._coming:
            return
        self._coming[index] = self._blocks[index].unshard(async_op=True)
        self._meter.sent["weights"] += self._sent[index]


def _shard_bytes(block: nn.Module) -> int:
    return sum(p.to_local().nbytes for p in block.parameters() if isinstance(p, DTensor))
