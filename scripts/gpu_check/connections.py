"""What communicators carry, over the transport that a plan takes between GPUs; two ranks may try it on one card."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_backend.comm.communicator import Communicator
from parallel_backend.comm.meter import Meter
from parallel_backend.mesh import build_mesh

from .bench import SMALL
from .report import Work
from .together import Together

ONE_CARD = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
}
"""What has ranks of one card that believe to be on two machines talk over the loopback interface."""

TIMES = 10
"""So often communicators are opened and closed."""


class Connections(Together):
    """Checks of the primitives."""

    def run(self) -> None:
        """The list; each rank of a shared card says that it is on a machine of its own, or NCCL refuses them."""
        if self.cuda and not self.apart:
            os.environ.update(ONE_CARD, NCCL_HOSTID=f"rank {self.rank}")
        super().run()

    def checks(self) -> Sequence[Work]:
        """Splits that are uneven or empty, a ring's hop, a gather into memory that comes and goes, and many communicators."""
        return self.splits, self.hop, self.gathers, self.again

    def everyone(self) -> Communicator:
        """All ranks on the device."""
        return Communicator("all", dist.group.WORLD, self.device, False, Meter(device=self.device))

    def piece(self, sender: int, receiver: int) -> Tensor:
        """What a rank sends to another one: of another length for each pair, and of none for the last."""
        length = 0 if receiver == self.ranks - 1 else 1000 * sender + 10 * receiver + 3
        return torch.full((length,), 100.0 * sender + receiver, device=self.device)

    def splits(self) -> None:
        """An all-to-all of uneven and empty pieces."""
        sent = [self.piece(self.rank, other) for other in range(self.ranks)]
        expected = [self.piece(other, self.rank) for other in range(self.ranks)]
        found = self.everyone().all_to_all(torch.cat(sent), [len(p) for p in sent], [len(p) for p in expected])
        self.say("uneven and empty splits", torch.equal(found, torch.cat(expected)), f"{len(found)} elements")

    def hop(self) -> None:
        """A ring's hop; some ranks have nothing to pass on."""
        lengths = [0 if rank % 2 else 5003 for rank in range(self.ranks)]
        before = (self.rank - 1) % self.ranks
        mine = torch.full((lengths[self.rank],), float(self.rank), device=self.device)
        found = self.everyone().shift(mine, lengths[before])()
        expected = torch.full_like(found, float(before))
        good = len(found) == lengths[before] and torch.equal(found, expected)
        self.say("a hop of a ring", good, f"{len(found)} elements")

    def gathers(self) -> None:
        """A gather into a buffer whose memory comes before it and goes after it, as that of sharded weights does."""
        everyone, size = self.everyone(), 1 << 16
        whole = torch.empty(self.ranks * size, dtype=torch.uint8, device=self.device)
        expected = torch.arange(self.ranks, dtype=torch.uint8, device=self.device).repeat_interleave(size)
        share = torch.full((size,), self.rank, dtype=torch.uint8, device=self.device)
        good = True
        for _ in range(TIMES):
            whole.untyped_storage().resize_(0)
            whole.untyped_storage().resize_(self.ranks * size)
            everyone.gather_into(whole, share)()
            good &= torch.equal(whole, expected)
        self.say("gathers into memory that comes and goes", good, f"{TIMES} of {self.ranks * size} bytes")

    def again(self) -> None:
        """A plan's communicators, opened and closed again and again."""
        plans = [{"ulysses": self.ranks}, {"ring": self.ranks}]
        if self.cuda and not self.apart:
            self.say("communicators again and again", None, "a plan's are NCCL's only where each rank has a GPU")
            return
        for number in range(TIMES):
            build_mesh(self.plan(SMALL, plans[number % 2]), self.device, Meter(device=self.device)).close()
        self.say("communicators again and again", True, f"{TIMES} times")
