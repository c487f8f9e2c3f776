"""Checks of several ranks: Ulysses, Ring, both, sharded weights, and loading of a file that all ranks need."""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from parallel_backend.attention.kernels import choose_kernel
from parallel_backend.attention.packages import package_failures
from parallel_backend.comm.communicator import Communicator
from parallel_backend.comm.meter import Meter
from parallel_backend.mesh import build_mesh
from parallel_backend.plan import ResolvedPlan
from parallel_backend.weights.loading.reading import Neighbours, WantedRange, Watch, read_ranges
from parallel_backend.weights.loading.rounds import CHUNK_BYTES
from parallel_backend.weights.stores.sharded import Sharded
from parallel_backend.wire.to_worker import SampleRequest
from parallel_backend.worker.requests.sampling import sample
from tests.dry.dry_rank import inspected
from tests.dry.full_size import JOBS
from tests.dry.lone_rank import LoneRank, request

from .bench import SHORT, TYPE, error_of, nothing
from .races import SIXTEEN, SMALL_SIXTEEN, five_times
from .ranks import Ranks
from .report import Work

UNEQUAL = 5
"""Number of tokens by which the text of one guidance branch is shorter."""


class Many(Ranks):
    """Checks of splits over several ranks."""

    def checks(self) -> Sequence[Work]:
        """Return the checks: every split against one rank, and overlap of messages with work."""
        return self.noise, self.splits, self.unequal, self.ring, self.sharded, self.races, self.loading

    def noise(self) -> None:
        """Report if all GPUs draw the same noise."""
        generator = torch.Generator(self.device).manual_seed(7)
        drawn = torch.randn(1, 16, 128, 128, device=self.device, generator=generator)
        mark = hashlib.sha256(drawn.cpu().numpy().tobytes()).digest()[:7]
        marks = [torch.zeros(1, dtype=torch.int64) for _ in range(self.ranks)]
        dist.all_gather(marks, torch.tensor([int.from_bytes(mark, "big")]))
        self.say("equal noise on all ranks", None, len({int(m) for m in marks}) == 1)

    def splits(self) -> None:
        """Compare Ulysses, Ring and both with one rank."""
        model, _ = self.model(self.name)
        _, alone = self.ours(self.name, self.plan(self.name), model)
        both = [{"ring": 2, "ulysses": self.ranks // 2}] if self.ranks > 2 and self.ranks % 2 == 0 else []
        for degrees in ({"ulysses": self.ranks}, {"ring": self.ranks}, *both):
            plan = self.plan(self.name, degrees)
            rank, run = self.ours(self.name, plan, model)
            free = self.free()
            mesh = rank.mesh(plan)
            self.say(f"communicators, {plan.degrees}", None, f"{(free - self.free()) / 1e6:.0f} MB")
            self.compare(plan.degrees, plan, run, alone)
            gather_flags = functools.partial(mesh.stage.all_gather, torch.zeros(1, 1, 1), [1] * self.ranks)
            self.say(f"cancel flag, {plan.degrees}", None, f"{self.milliseconds(gather_flags, 50):.2f} ms")
            mesh.close()

    def unequal(self) -> None:
        """Compare two pictures with prompts of two lengths, with the branches and with the pictures on separate ranks."""
        if self.ranks % 2:
            self.say("prompts of two lengths", None, "not run: it needs an even number of ranks")
            return
        model, _ = self.model(self.name)
        sides = request(JOBS[self.name], self.plan(self.name, {"cfg": 2}), self.computes_in)
        tensors = self.tensors(self.name, SHORT, sides=2)
        tensors["prompt.1.context"] = tensors["prompt.1.context"][:, :-UNEQUAL]
        tensors["x"] = torch.cat([tensors["x"], tensors["x"].flip(-1)])
        expected = self.once(sides, self.plan(self.name), model, tensors)
        for axis in ("cfg", "data"):
            plan = self.plan(self.name, {axis: 2, "ulysses": self.ranks // 2})
            found = self.once(sides, plan, model, tensors)
            if found is not None:
                assert expected is not None
                error = error_of(found, expected)
                self.say(f"prompts of two lengths, {plan.degrees}", error < self.tolerance, f"error {error:.1e}")

    def once(
        self, sides: SampleRequest, plan: ResolvedPlan, model: Any, tensors: Mapping[str, Tensor]
    ) -> Tensor | None:
        """Return a plan's result of a request, on the rank that has it."""
        rank = LoneRank(self.device, Meter(device=self.device), model)
        sample(rank, msgspec.structs.replace(sides, plan=plan), dict(tensors))  # type: ignore[arg-type]
        return rank.answer.get("result")

    def free(self) -> int:
        """Return the device's free bytes."""
        return torch.cuda.mem_get_info()[0] if self.cuda else 0

    def ring(self) -> None:
        """Check that attention hides a hop of the ring."""
        heads, tokens = inspected(self.name)[1].shape.heads, self.tokens() // self.ranks
        mesh = build_mesh(self.plan(self.name, {"ring": self.ranks}), self.device, Meter(device=self.device))
        kv = torch.zeros(2 * tokens * heads * 128, device=self.device, dtype=TYPE)
        q = torch.randn(1, tokens, heads, 128, device=self.device, dtype=TYPE)
        attend = choose_kernel("auto", self.device, TYPE, 128, package_failures(self.device)).attend

        def hop(beside: Work = nothing) -> None:
            wait = mesh.ring.start_shift(kv, kv.numel())
            beside()
            wait()

        sent, work = self.milliseconds(hop), self.milliseconds(lambda: attend(q, q, q))
        both = self.milliseconds(lambda: hop(lambda: attend(q, q, q)))
        hidden = both < 1.15 * max(sent, work) if self.apart else None
        self.say(
            "a hop overlaps with attention", hidden, f"hop {sent:.2f} ms, attention {work:.2f} ms, both {both:.2f} ms"
        )
        mesh.close()

    def sharded(self) -> None:
        """Compare sharded weights with one rank's weights."""
        if self.cuda and not self.apart:
            self.say("sharded weights", None, "not run: NCCL gathers the weights, and needs a GPU for each rank")
            return
        everyone = Communicator("weights", dist.group.WORLD, self.device, False, Meter(device=self.device))
        plan = msgspec.structs.replace(self.plan(self.name, {"ulysses": self.ranks}), weights="sharded")
        model, store = self.model(self.name, lambda module, blocks: Sharded(module, blocks, everyone))
        _, run = self.ours(self.name, plan, model, access=store)
        whole, _ = self.model(self.name)
        self.compare(
            f"sharded weights, {plan.degrees}", plan, run, self.ours(self.name, self.plan(self.name), whole)[1]
        )

    def races(self) -> None:
        """Check sixteen sharded blocks on nearly full cards. Each block is gathered while the block before it computes."""
        if self.cuda and not self.apart:
            self.say(
                "sharded, sixteen blocks", None, "not run: NCCL gathers the weights, and needs a GPU for each rank"
            )
            return
        name = SIXTEEN if self.cuda else SMALL_SIXTEEN
        everyone = Communicator("weights", dist.group.WORLD, self.device, False, Meter(device=self.device))
        plan = msgspec.structs.replace(self.plan(name, {"ulysses": self.ranks}), weights="sharded")
        whole, _ = self.model(name)
        right = self.ours(name, self.plan(name, {"ulysses": self.ranks}), whole)[1](SHORT, nothing)
        del whole
        model, store = self.model(name, lambda module, blocks: Sharded(module, blocks, everyone))
        five_times(self, "sharded, sixteen blocks", lambda *_: right, self.ours(name, plan, model, access=store)[1])

    def loading(self) -> None:
        """Time each way of reading a file that all ranks need. The file is in the page cache."""
        file = Path(tempfile.gettempdir(), f"parallel-loading-{os.environ['MASTER_PORT']}")
        everyone = Communicator("loading", dist.group.WORLD, torch.device("cpu"), False, Meter())
        linked = self.apart or not self.cuda
        links = (
            Communicator("links", dist.group.WORLD, self.device, False, Meter(device=self.device)) if linked else None
        )
        neighbours = Neighbours(everyone, (0,) * self.ranks, links)
        if self.rank == 0:
            file.write_bytes(os.urandom((64 if self.cuda else 4) * CHUNK_BYTES))
        everyone.barrier()
        expected = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8).to(self.device)
        found = torch.empty_like(expected)

        def put(offset: int, data: Tensor) -> None:
            found[offset : offset + len(data)] = data

        want, watch = WantedRange(0, 0, len(found), put), Watch(lambda: False, lambda *_: None, lambda _: None)
        for way in neighbours.ways:
            found.zero_()
            everyone.barrier()
            start = time.perf_counter()
            read_ranges([file], [want], neighbours, watch, way)
            self.wait()
            seconds = time.perf_counter() - start
            self.say(f"loading, {way.value}", torch.equal(found, expected), f"{len(found) / 1e9 / seconds:.1f} GB/s")
        everyone.barrier()
        if self.rank == 0:
            file.unlink()
