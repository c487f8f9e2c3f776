"""One attention under Ulysses 2 on a slow network, its heads exchanged in 1, 2 and 4 chunks: seconds, and those of waiting.

From the repository's root, as root: OMP_NUM_THREADS=1 COMFYUI_PATH=… python -m benchmarks.hidden_exchange
Each rank is in a network namespace of its own (see slow_network). The attention kernel sleeps in proportion to its heads, as
long as a host waits for a GPU, so that what hides is not what two processes on few cores take from each other.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.slow_network import ADDRESS, INTERFACE, Network
from parallel_backend.attention.kernels import choose_kernel
from parallel_backend.attention.sequence_parallel import UspLayout, usp_attention
from parallel_backend.comm.meter import Meter
from parallel_backend.layout import SequenceSplit
from parallel_backend.mesh import build_mesh
from tests.support.plans import cpu_plan

CPU = torch.device("cpu")
TOKENS, HEADS, HEAD_DIM = 1152, 16, 64
CHUNKS = (1, 2, 4)
START_SECONDS = 240


def rank_main(rank: int, sleep: float, rounds: int) -> None:
    """One rank: prints, as JSON, seconds and seconds of waiting of each number of chunks, the medians of the rounds."""
    dist.init_process_group("gloo", rank=rank, world_size=2)
    meter = Meter()
    mesh = build_mesh(cpu_plan(ulysses=2), CPU, meter)
    kernel = choose_kernel("auto", CPU, torch.float32, HEAD_DIM).attend

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        started = time.perf_counter()
        out = kernel(q, k, v)
        time.sleep(max(0.0, sleep * q.shape[2] / (HEADS // 2) - (time.perf_counter() - started)))
        return out

    split = SequenceSplit((TOKENS // 2,) * 2, HEADS, 1, 2, (1, 1))
    q, k, v = torch.randn(3, 1, TOKENS // 2, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(rank))
    layouts = {chunks: UspLayout(mesh, split, attend, chunks) for chunks in CHUNKS}
    taken: dict[int, list[tuple[float, float, int]]] = {chunks: [] for chunks in CHUNKS}
    expected = usp_attention(q, k, v, layouts[1])
    for _ in range(rounds):
        for chunks, layout in layouts.items():
            mesh.stage.barrier()
            meter.reset()
            started = time.perf_counter()
            out = usp_attention(q, k, v, layout)
            taken[chunks].append((time.perf_counter() - started, meter.waiting_seconds(), sum(meter.sent.values())))
            assert torch.equal(out, expected)
    if rank == 0:
        print(
            json.dumps(
                {
                    chunks: [statistics.median(each) for each in zip(*all_, strict=True)]
                    for chunks, all_ in taken.items()
                }
            )
        )
    dist.destroy_process_group()


def measured(network: Network, sleep: float, rounds: int) -> dict[str, Sequence[float]]:
    """What rank 0 printed."""
    together = {"WORLD_SIZE": "2", "MASTER_ADDR": ADDRESS.host, "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": INTERFACE}
    command = [
        sys.executable,
        "-m",
        "benchmarks.hidden_exchange",
        "--sleep",
        str(sleep),
        "--rounds",
        str(rounds),
        "--rank",
    ]
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", space, *command, str(rank)],
            env=os.environ | together,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, space in enumerate(network.spaces)
    ]
    try:
        printed, _ = ranks[0].communicate(timeout=START_SECONDS)
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    found: dict[str, Sequence[float]] = json.loads(printed)
    return found


def main() -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabits", type=int, default=100)
    parser.add_argument("--sleep", type=float, default=1.0, help="seconds that attention takes on each rank")
    parser.add_argument("--rank", type=int, help="for the ranks that it starts")
    arguments = parser.parse_args()
    if arguments.rank is not None:
        rank_main(arguments.rank, arguments.sleep, arguments.rounds)
        return 0
    if os.geteuid() != 0:
        print("This benchmark makes network namespaces, which needs root: run it as root.", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces go then too
    print("| attention, s | chunks | s | of it waiting | sent, bytes |\n| ---: | ---: | ---: | ---: | ---: |")
    with Network() as network:
        network.shape(arguments.megabits)
        for sleep in (arguments.sleep, arguments.sleep / 4):
            for chunks, (seconds, waiting, sent) in measured(network, sleep, arguments.rounds).items():
                print(f"| {sleep:g} | {chunks} | {seconds:.2f} | {waiting:.2f} | {sent:,.0f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
