"""Compares ways to store weights on two ranks: peak memory, bytes that move, and the time of a step.

The script compares sharding by bytes with torch's FSDP2. It compares streaming from host memory, with all blocks, half of them
and two on the device, with replicated weights. Then it prints the peak of a rank of Wan 2.2 14B by the formula that plans use.
Last it compares the formula with the memory of a small Wan of the same class.

    OMP_NUM_THREADS=1 COMFYUI_PATH=... python -m benchmarks.weights [--runs 10] [--size 24]

CPU, gloo, one thread per rank, fp32; the forms take turns. A peak is that of all bytes from torch's allocator during a forward,
beyond those that the rank held before.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from parallel_backend.comm.communicator import Communicator
from parallel_backend.comm.meter import Meter
from parallel_backend.models.comfyui.plan_shape import plan_shape
from parallel_backend.models.comfyui.proof.rank import ProofRank, plan_for
from parallel_backend.models.comfyui.small import Builder, Case, small
from parallel_backend.models.comfyui.small.often_used import wan as small_wan
from parallel_backend.models.sequence_parallel.blocks import blocks_of
from parallel_backend.plan import ModelShape
from parallel_backend.plan.predict.memory import needs
from parallel_backend.plan.predict.profiles import DenoiseJob
from parallel_backend.weights.stores.replicated import ReplicatedStore
from parallel_backend.weights.stores.sharded import Sharded
from parallel_backend.weights.stores.store import BlockAccess, WeightStore
from parallel_backend.weights.stores.streamed import Streamed
from tests.support.plans import cpu_plan
from tests.support.ranks import run_ranks
from tests.support.tiny.models import draw

CPU = torch.device("cpu")
RANKS = 2
BLOCKS = 8
TEXT = 512
ROUND = 2**20

Arrange = Callable[[nn.Module, Sequence[nn.Module], Meter], tuple[WeightStore | None, BlockAccess]]


class Fsdp(BlockAccess):
    """Blocks under torch's FSDP2 with the next block's gather in flight, as this pack sharded weights before."""

    def __init__(self, blocks: Sequence[nn.Module], meter: Meter) -> None:
        mesh = init_device_mesh("cpu", (RANKS,))
        self._blocks: list[FSDPModule] = [fully_shard(block, mesh=mesh) for block in blocks]  # type: ignore[misc]
        self._shards = [
            sum(p.to_local().nbytes for p in block.parameters() if isinstance(p, DTensor)) for block in blocks
        ]
        self._meter = meter
        self._coming: dict[int, Any] = {}

    @contextmanager
    def block(self, index: int) -> Iterator[None]:
        """Gather the block, start the next block's gather, and free the block afterwards."""
        self._begin(index)
        handle = self._coming.pop(index)
        if index + 1 < len(self._blocks):
            self._begin(index + 1)
        if handle is not None:
            handle.wait()
        yield
        self._blocks[index].reshard()

    def _begin(self, index: int) -> None:
        if index not in self._coming:
            self._coming[index] = self._blocks[index].unshard(async_op=True)
            self._meter.sent["weights"] += (RANKS - 1) * self._shards[index]


def _filled(store: WeightStore, module: nn.Module) -> WeightStore:
    values = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    store.materialise(CPU)
    for name, value in values.items():
        run = store.run(name)
        run.values.copy_(value.view(-1)[run.start : run.stop])
    for name, buffer in buffers.items():
        module.get_buffer(name).copy_(buffer)
    store.settle()
    return store


def _sharded(module: nn.Module, blocks: Sequence[nn.Module], meter: Meter) -> tuple[WeightStore, BlockAccess]:
    store = Sharded(module, blocks, Communicator("weights", dist.group.WORLD, CPU, False, meter))
    return _filled(store, module), store


def _streamed(part: float) -> Arrange:
    """Return a form that streams weights, with room for the fraction `part` of the blocks' bytes."""

    def arrange(module: nn.Module, blocks: Sequence[nn.Module], meter: Meter) -> tuple[WeightStore, BlockAccess]:
        store = Streamed(module, blocks, Communicator("subgroup", dist.group.WORLD, CPU, False, meter), CPU, meter)
        whole = sum(parameter.nbytes for block in blocks for parameter in block.parameters())
        _filled(store, module).fit(int(part * whole) - (store.nbytes - store.movable))
        return store, store

    return arrange


FORMS: Mapping[str, Arrange] = {
    "replicated": lambda module, blocks, meter: (ReplicatedStore(module), BlockAccess()),
    "FSDP2": lambda module, blocks, meter: (None, Fsdp(blocks, meter)),
    "sharded": _sharded,
    "streamed, all blocks fit": _streamed(1.01),
    "streamed, half of them": _streamed(0.5),
    "streamed, two blocks": _streamed(0.0),
}


@dataclass(frozen=True)
class Figures:
    """The figures of one form on one rank, in bytes and seconds.

    Attributes:
        held: bytes of weights between forwards.
        peak: peak bytes beyond those.
        moved: bytes moved per forward.
        seconds: seconds of the fastest step.
        error: relative error of the result.
    """

    held: int
    peak: int
    moved: int
    seconds: float
    error: float


def wan(layers: int, size: int) -> Case:
    """Return a Wan with small blocks and its call on a video of 3 latent frames."""
    example = small_wan(Builder(), "WAN21_T2V", {}, num_layers=layers, ffn_dim=1536)
    return replace(example, noise=(draw(1, 16, 3, size, size, seed=1),)).case()


def peak_of(work: Callable[[], Any]) -> int:
    """Return the peak bytes from torch's allocator while `work` runs, beyond those from before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def held_of(module: nn.Module, store: WeightStore | None) -> int:
    """Return the device bytes of weights between forwards."""
    if store is not None:
        return store.movable + store.beyond
    tensors = [*module.parameters(), *module.buffers()]
    return sum(t.to_local().nbytes if isinstance(t, DTensor) else t.nbytes for t in tensors)


def figures(case: Case, runs: int) -> list[Figures]:
    """Return a row for each form, with the maximum over ranks."""
    plan = plan_for(case, ulysses=RANKS)
    expected = case.stock()

    def on_rank(number: int) -> list[tuple[float, ...]]:
        forms = []
        for arrange in FORMS.values():
            meter = Meter()
            rank = ProofRank(case, plan)
            store, access = arrange(rank.module, rank.blocks, meter)
            rank.hold(access)
            out = rank.run()
            assert out is not None
            error = float((out - expected).norm() / expected.norm())
            meter.reset()
            rank.run()
            moved = meter.sent["weights"]
            forms.append((rank, held_of(rank.module, store), peak_of(rank.run), moved, error))
        times: list[list[float]] = [[] for _ in forms]
        for _ in range(runs):
            for (rank, *_), seconds in zip(forms, times, strict=True):
                dist.barrier()
                started = time.perf_counter()
                rank.run()
                seconds.append(time.perf_counter() - started)
        return [
            (held, peak, moved, min(seconds), error)
            for (_, held, peak, moved, error), seconds in zip(forms, times, strict=True)
        ]

    found = run_ranks(RANKS, torch.no_grad()(on_rank), timeout=3600)
    return [Figures(*map(max, zip(*rows, strict=True))) for rows in zip(*found, strict=True)]  # type: ignore[arg-type]


def shape_of(case: Case) -> ModelShape:
    """Return the shape that plans use for a model."""
    return plan_shape(case.kind, case.model, case.declaration, blocks_of(case.model, case.declaration), 16, 3)


def wan_14b() -> ModelShape:
    """Return the shape of Wan 2.2 14B, text to video, made on the meta device."""
    sizes = {"dim": 5120, "ffn_dim": 13824, "text_dim": 4096, "num_heads": 40, "num_layers": 40, "in_dim": 16}
    model = type(small("wan, text").model)(**Builder().settings | sizes | {"device": "meta"})
    tiny = small("wan, text")
    return shape_of(Case(model, tiny.declaration, tiny.x, tiny.timestep, tiny.arguments, tiny.kind))


def print_formula() -> None:
    """Print the peak of a rank by the formula, in bf16."""
    shape = wan_14b()
    job = DenoiseJob(image_tokens=75_600, text_tokens=TEXT, has_uncond=False, steps=20)
    print("\n| plan | weights | gathered | activations | peak of a rank, GB |\n|---|---:|---:|---:|---:|")
    for name, settings in {
        "1 worker": {},
        "1 worker, weights streamed": {"weights": "streamed"},
        "ulysses 2": {"ulysses": 2},
        "ulysses 4": {"ulysses": 4},
        "ulysses 4, weights sharded": {"ulysses": 4, "weights": "sharded"},
        "ulysses 4, weights streamed": {"ulysses": 4, "weights": "streamed"},
        "ulysses 8, weights sharded": {"ulysses": 8, "weights": "sharded"},
        "pipefusion 4": {"pipefusion": 4},
    }.items():
        found = needs(cpu_plan(blocks=shape.blocks, **settings), shape, job)  # type: ignore[arg-type]
        each = (found.weights, found.gathered, found.activations, found.weights + found.working)
        print(f"| {name} | " + " | ".join(f"{value / 1e9:.1f}" for value in each) + " |")


def print_measured(size: int) -> None:
    """Print the formula's activations and those counted on a small Wan."""
    print("\n| tokens | ranks | formula, MB | counted, MB | counted / formula |\n|---:|---:|---:|---:|---:|")
    for side in (size, 2 * size):
        case = wan(2, side)
        tokens = 3 * (side // 2) ** 2
        for ranks in (1, RANKS):
            plan = plan_for(case, ulysses=ranks)

            def counted(_: int, case: Case = case, plan: Any = plan) -> int:
                rank = ProofRank(case, plan)
                rank.run()
                return peak_of(rank.run)

            job = DenoiseJob(image_tokens=tokens, text_tokens=7, element=4, weight_element=4)
            formula = needs(plan, shape_of(case), job).activations
            found = max(run_ranks(ranks, torch.no_grad()(counted), timeout=3600))
            print(f"| {tokens} | {ranks} | {formula / 1e6:.1f} | {found / 1e6:.1f} | {found / formula:.2f} |")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--size", type=int, default=24, help="latent values along each side")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad():
        case = wan(BLOCKS, options.size)
        block = sum(p.nbytes for p in case.model.blocks[0].parameters())
        print(f"{BLOCKS} blocks of {block / ROUND:.1f} MiB, {3 * (options.size // 2) ** 2} tokens, {RANKS} ranks\n")
        print("| weights | held, MiB | peak beyond, MiB | moved a step, MiB | a step, s | ratio | error |")
        print("|---|---:|---:|---:|---:|---:|---:|")
        rows = figures(case, options.runs)
        for name, row in zip(FORMS, rows, strict=True):
            sizes = " | ".join(f"{value / ROUND:.1f}" for value in (row.held, row.peak, row.moved))
            print(f"| {name} | {sizes} | {row.seconds:.4f} | {row.seconds / rows[0].seconds:.3f} | {row.error:.0e} |")
        print_formula()
        print_measured(options.size)


if __name__ == "__main__":
    main()
