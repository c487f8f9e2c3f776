"""Checks of communicators over the transport that a plan uses between GPUs. Two ranks may run them on one card."""

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
"""NCCL settings with which ranks of one card, each posing as another machine, talk over the loopback interface."""

TIMES = 10
"""Number of times that communicators are opened and closed."""


class Connections(Ranks):
    """Checks of the communication primitives."""

    def run(self) -> None:
        """Run the list. Each rank of a shared card poses as another machine, because NCCL would refuse them otherwise."""
        if self.cuda and not self.apart:
            os.environ.update(ONE_CARD, NCCL_HOSTID=f"rank {self.rank}")
        self.log = Path(os.environ.get("OUT") or tempfile.gettempdir(), f"nccl-{self.rank}.txt").absolute()
        self.log.unlink(missing_ok=True)
        os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_FILE=str(self.log))
        super().run()

    def checks(self) -> Sequence[Work]:
        """Return the checks: uneven splits, a ring's hop, gathers, repeated opening of communicators, and pairs of ranks."""
        return self.open, self.splits, self.hop, self.gathers, self.again, self.pairs, self.ways

    def open(self) -> None:
        """Connect the ranks. Where NCCL refuses ranks of one card, make each rank a group of its own."""
        self.group = dist.group.WORLD
        if not self.cuda or self.apart:
            return
        try:
            dist.all_reduce(torch.zeros(1, device=self.device))
            self.wait()
        except RuntimeError as error:
            self.group, _ = dist.new_subgroups_by_enumeration([[rank] for rank in range(self.ranks)], backend="nccl")
            self.say(
                "ranks of one card",
                None,
                f"each rank is checked alone, because NCCL refuses several ranks on one card: {error}",
            )

    def everyone(self) -> Communicator:
        """Return a communicator of all connected ranks on the device."""
        return Communicator("all", self.group, self.device, False, Meter(device=self.device))

    def piece(self, sender: int, receiver: int) -> Tensor:
        """Return the piece that a rank sends to another: its length differs for each pair, and is 0 for the last receiver."""
        length = 0 if receiver == self.ranks - 1 else 1000 * sender + 10 * receiver + 3
        return torch.full((length,), 100.0 * sender + receiver, device=self.device)

    def splits(self) -> None:
        """Check an all-to-all of uneven and empty pieces."""
        everyone = self.everyone()
        if everyone.size == 1:
            self.say("uneven and empty splits", None, "not run: NCCL connects no ranks here")
            return
        sent = [self.piece(self.rank, other) for other in range(self.ranks)]
        expected = [self.piece(other, self.rank) for other in range(self.ranks)]
        found = everyone.all_to_all(torch.cat(sent), [len(p) for p in sent], [len(p) for p in expected])
        self.say("uneven and empty splits", torch.equal(found, torch.cat(expected)), f"{len(found)} elements")

    def hop(self) -> None:
        """Check a ring's hop in which some ranks have nothing to send."""
        everyone = self.everyone()
        lengths = [0 if rank % 2 else 5003 for rank in range(everyone.size)]
        before = (everyone.rank - 1) % everyone.size
        mine = torch.full((lengths[everyone.rank],), float(everyone.rank), device=self.device)
        found = everyone.start_shift(mine, lengths[before])()
        expected = torch.full_like(found, float(before))
        good = len(found) == lengths[before] and torch.equal(found, expected)
        self.say("a hop of a ring", good, f"{len(found)} elements in a group of {everyone.size}")

    def gathers(self) -> None:
        """Check gathers into a buffer that is allocated before and freed after each, as for sharded weights."""
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
        self.say(
            "gathers into memory that is allocated each time", good, f"{TIMES} gathers of {everyone.size * size} bytes"
        )

    def again(self) -> None:
        """Open and close a plan's communicators repeatedly."""
        plans = [{"ulysses": self.ranks}, {"ring": self.ranks}]
        if self.cuda and not self.apart:
            self.say(
                "communicators opened repeatedly", None, "not run: plans use NCCL only if each rank has its own GPU"
            )
            return
        for number in range(TIMES):
            build_mesh(self.plan(SMALL, plans[number % 2]), self.device, Meter(device=self.device)).close()
        self.say("communicators opened repeatedly", True, f"{TIMES} times")

    def pairs(self) -> None:
        """Check and time the transfer from each rank to each other rank; between cards by P2P where they have it."""
        everyone, hosts = self.everyone(), Communicator("hosts", dist.group.WORLD, HOST, False, Meter())
        if everyone.size == 1:
            self.say("from rank to rank", None, "not run: NCCL connects no ranks here")
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
                found = everyone.receive(expected.shape, expected.dtype, sender)  # opens the connection
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
        """Return the driver's answer about P2P between two cards."""
        if not self.apart:
            return "both ranks on one card" if self.cuda else "both ranks on the CPU"
        linked = torch.cuda.can_device_access_peer(self.device.index, sender % self.gpus)
        return "the driver reports P2P" if linked else "the driver reports no P2P"

    def ways(self) -> None:
        """Report the transports that NCCL logged. The log stays with the report."""
        found = transports(self.log.read_text()) if self.log.exists() else {}
        text = ", ".join(f"{way} on {count} channels" for way, count in found.items())
        self.say("NCCL's transports", None, text or "none in NCCL's log")


def transports(log: str) -> dict[str, int]:
    """Return the number of channels for each transport in NCCL's log (NCCL_DEBUG=INFO)."""
    return dict(Counter(re.findall(r"Channel \S+ : .* via (\S+)", log)))
