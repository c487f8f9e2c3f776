"""Connections are tried with patterns, so that corrupted data is found before anything is computed with it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel_backend.comm.communicator import Communicator
from parallel_backend.comm.meter import Meter
from parallel_backend.host.workers.causes import known_cause
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


class Swapping(Communicator):
    """A communicator over a connection on which one rank receives another rank's data."""

    def _incoming(self, tensor: Tensor) -> Tensor:
        return tensor.flip(0) if self.rank == 1 else tensor


@pytest.mark.parametrize("ranks", [2, 3])
def test_data_that_arrives_changed_is_reported_as_a_p2p_fault(ranks: int) -> None:
    def rank(_: int) -> str:
        Communicator("right", dist.group.WORLD, CPU, False, Meter()).warm_up()
        try:
            Swapping("wrong", dist.group.WORLD, CPU, False, Meter()).warm_up()
        except RuntimeError as error:
            return str(error)
        return ""

    found = run_ranks(ranks, rank)
    assert [bool(said) for said in found] == [number == 1 for number in range(ranks)]
    cause = known_cause(found[1])
    assert cause is not None and cause.name == "P2P"
