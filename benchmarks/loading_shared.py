"""How ranks of one machine that want the same bytes get them: sent by the one that reads, or read again after it.

Each rank wants a whole file, in the page cache and not in it; the ways take turns. The table of docs/guide/loading.md.

Run from the repository root: python -m benchmarks.loading_shared [MiB of the file, 512 by default]
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_backend.comm.communicator import Communicator
from parallel_backend.comm.meter import Meter
from parallel_backend.weights.loading.reading import Neighbours, Want, Watch, read_wanted
from parallel_backend.weights.loading.rounds import CHUNK_BYTES, Way
from tests.support.loading_costs import field, forget
from tests.support.ranks import run_ranks

WAYS = {"sent": Way.SENT, "read again": Way.AGAIN, "the faster one": None}
ROUNDS = 3


def seconds(ranks: int, file: Path, cold: bool) -> dict[str, tuple[float, int]]:
    """Of each way the shortest time, and the most bytes that all ranks together had from the disk."""

    def on(rank: int) -> dict[str, list[tuple[float, int]]]:
        target = torch.zeros(file.stat().st_size, dtype=torch.uint8)
        everyone = Communicator("loading", dist.group.WORLD, torch.device("cpu"), False, Meter())
        watch = Watch(lambda: False, lambda *_: None, lambda _: None)

        def put(start: int, offset: int, data: Tensor) -> None:
            target[start + offset : start + offset + len(data)] = data

        starts = range(0, len(target), CHUNK_BYTES)
        wants = [Want(0, at, min(at + CHUNK_BYTES, len(target)), partial(put, at)) for at in starts]
        found: dict[str, list[tuple[float, int]]] = {name: [] for name in WAYS}
        for _ in range(ROUNDS):
            for name, way in WAYS.items():
                if cold and rank == 0:
                    forget(file)
                everyone.barrier()
                start, disk = time.perf_counter(), field(os.getpid(), "io", "read_bytes")
                read_wanted([file], wants, Neighbours(everyone, (0,) * ranks), watch, way)
                everyone.barrier()
                found[name].append((time.perf_counter() - start, field(os.getpid(), "io", "read_bytes") - disk))
        return found

    of_ranks = run_ranks(ranks, on, timeout=600)
    runs = {name: list(zip(*(each[name] for each in of_ranks), strict=True)) for name in WAYS}
    return {
        name: (min(run[0][0] for run in of_way), max(sum(disk for _, disk in run) for run in of_way))
        for name, of_way in runs.items()
    }


def main() -> None:
    """Print the table."""
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 512
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "bytes")
        file.write_bytes(os.urandom(size << 20))
        print("| ranks | page cache |", *(f"{name}, s |" for name in WAYS), "from the disk, at most, MiB |")
        print("|---:|---|" + "---:|" * (len(WAYS) + 1))
        for ranks in (2, 4):
            for cold in (False, True):
                found = seconds(ranks, file, cold)
                disk = max(read for _, read in found.values()) >> 20
                cells = (f"{taken:.2f} |" for taken, _ in found.values())
                print(f"| {ranks} | {'empty' if cold else 'has the file'} |", *cells, f"{disk} |", flush=True)


if __name__ == "__main__":
    main()
