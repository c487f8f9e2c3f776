"""What communicators carry, over the transport that a plan takes between GPUs; two ranks may try it on one card."""

from __future__ import annotations

import itertools
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_backend.comm.communicator import Communicator
from parallel_backend.comm.meter import Meter
from parallel_backend.mesh import build_mesh
from parallel_backend.weights.stores.host_copy import HOST

from .bench import REPEATS, SMALL
from .ranks import Ranks
from .report import Work

ONE_CARD = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
}
"""What has ranks of one card that believe to be on two machines talk over the loopback interface."""

TIMES = 10
"""So often communicators are opened and closed."""


class Connections(Ranks):
    """Checks of the primitives."""

    def run(self) -> None:
        """The list; each rank of a shared card says that it is on a machine of its own, or NCCL refuses them."""
        if self.cuda and not self.apart:
            os.environ.update(ONE_CARD, NCCL_HOSTID=f"rank {self.rank}")
        self.log = Path(os.environ.get("OUT") or tempfile.gettempdir(), f"nccl-{self.rank}.txt").absolute()
        self.log.unlink(missing_ok=True)
        os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_FILE=str(self.log))
        super().run()

    def checks(self) -> Sequence[Work]:
        """Uneven and empty splits, a ring's hop, a gather into memory that comes and goes, many communicators, and each pair."""
        return self.open, self.splits, self.hop, self.gathers, self.again, self.pairs, self.ways

    def open(self) -> None:
        """Ranks of one card meet, or, where NCCL refuses that, each is a group of its own."""
        self.group = dist.group.WORLD
        if not self.cuda or self.apart:
            return
        try:
            dist.all_reduce(torch.zeros(1, device=self.device))
            self.wait()
        except RuntimeError as error:
            self.group, _ = dist.new_subgroups_by_enumeration([[rank] for rank in range(self.ranks)], backend="nccl")
            self.say("ranks of one card", None, f"each to itself, because NCCL refuses them together: {error}")

    def everyone(self) -> Communicator:
        """All ranks on the device that meet."""
        return Communicator("all", self.group, self.device, False, Meter(device=self.device))

    def piece(self, sender: int, receiver: int) -> Tensor:
        """What a rank sends to another one: of another length for each pair, and of none for the last."""
        length = 0 if receiver == self.ranks - 1 else 1000 * sender + 10 * receiver + 3
        return torch.full((length,), 100.0 * sender + receiver, device=self.device)

    def splits(self) -> None:
        """An all-to-all of uneven and empty pieces."""
        everyone = self.everyone()
        if everyone.size == 1:
            self.say("uneven and empty splits", None, "are for ranks that meet")
            return
        sent = [self.piece(self.rank, other) for other in range(self.ranks)]
        expected = [self.piece(other, self.rank) for other in range(self.ranks)]
        found = everyone.all_to_all(torch.cat(sent), [len(p) for p in sent], [len(p) for p in expected])
        self.say("uneven and empty splits", torch.equal(found, torch.cat(expected)), f"{len(found)} elements")

    def hop(self) -> None:
        """A ring's hop; some ranks have nothing to pass on."""
        everyone = self.everyone()
        lengths = [0 if rank % 2 else 5003 for rank in range(everyone.size)]
        before = (everyone.rank - 1) % everyone.size
        mine = torch.full((lengths[everyone.rank],), float(everyone.rank), device=self.device)
        found = everyone.start_shift(mine, lengths[before])()
        expected = torch.full_like(found, float(before))
        good = len(found) == lengths[before] and torch.equal(found, expected)
        self.say("a hop of a ring", good, f"{len(found)} elements in a group of {everyone.size}")

    def gathers(self) -> None:
        """A gather into a buffer whose memory comes before it and goes after it, as that of sharded weights does."""
        everyone, size = self.everyone(), 1 << 16
        whole = torch.empty(everyone.size * size, dtype=torch.uint8, device=self.device)
        expected = torch.arange(everyone.size, dtype=torch.uint8, device=self.device).repeat_interleave(size)
        share = torch.full((size,), everyone.rank, dtype=torch.uint8, device=self.device)
        good = True
        for _ in range(TIMES):
            whole.untyped_storage().resize_(0)
            whole.untyped_storage().resize_(everyone.size * size)
            everyone.start_all_gather_into(whole, share)()
            good &= torch.equal(whole, expected)
        self.say("gathers into memory that comes and goes", good, f"{TIMES} of {everyone.size * size} bytes")

    def again(self) -> None:
        """A plan's communicators, opened and closed again and again."""
        plans = [{"ulysses": self.ranks}, {"ring": self.ranks}]
        if self.cuda and not self.apart:
            self.say("communicators again and again", None, "a plan's are NCCL's only where each rank has a GPU")
            return
        for number in range(TIMES):
            build_mesh(self.plan(SMALL, plans[number % 2]), self.device, Meter(device=self.device)).close()
        self.say("communicators again and again", True, f"{TIMES} times")

    def pairs(self) -> None:
        """Data from each rank to each other one, and how fast it comes; between cards, by P2P where they have it."""
        everyone, hosts = self.everyone(), Communicator("hosts", dist.group.WORLD, HOST, False, Meter())
        if everyone.size == 1:
            self.say("from rank to rank", None, "is for ranks that meet")
            return
        size = 1 << (26 if self.cuda else 16)
        for sender, receiver in itertools.permutations(range(self.ranks), 2):
            expected = torch.arange(size, device=self.device, dtype=torch.int32) * (sender + 3) + receiver
            hosts.barrier()
            if self.rank == sender:
                for _ in range(1 + REPEATS):
                    everyone.send(expected, receiver)
                everyone.finish_sending()
            if self.rank == receiver:
                found = everyone.receive(expected.shape, expected.dtype, sender)  # which opens the connection
                right = torch.equal(found, expected)
                self.wait()
                start = time.perf_counter()
                for _ in range(REPEATS):
                    found = everyone.receive(expected.shape, expected.dtype, sender)
                self.wait()
                rate = REPEATS * expected.nbytes / 1e9 / (time.perf_counter() - start)
                good = right and torch.equal(found, expected)
                between = None if self.cuda and not self.apart and good else good
                self.say(f"from rank {sender} to rank {receiver}", between, f"{rate:.2f} GB/s, {self.peers(sender)}")
            self.wait()

    def peers(self, sender: int) -> str:
        """What the driver says of two cards."""
        if not self.apart:
            return "not between cards"
        linked = torch.cuda.can_device_access_peer(self.device.index, sender % self.gpus)
        return "P2P by the driver" if linked else "no P2P by the driver"

    def ways(self) -> None:
        """The transports that NCCL has told of; its lines stay with the report."""
        found = transports(self.log.read_text()) if self.log.exists() else {}
        text = ", ".join(f"{way} on {count} channels" for way, count in found.items())
        self.say("NCCL's transports", None, text or "NCCL has told of none")


def transports(log: str) -> dict[str, int]:
    """By which way how many channels go, from what NCCL logs (NCCL_DEBUG=INFO)."""
    return dict(Counter(re.findall(r"Channel \S+ : .* via (\S+)", log)))
