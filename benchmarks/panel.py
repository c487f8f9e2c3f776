"""What the sidebar tab costs on the sampling path, in CPU time, so that a busy machine does not matter.

1. In a worker: noting on the timeline when it waited, for each step of FLUX.1 (57 blocks, with two exchanges each).
2. In ComfyUI's process, once a second while a page looks on: the state of 16 ranks, compared, and as JSON.
3. Once a run: a record of 16 ranks and its timeline, when a page asks for it.

Run from the repository root: python -m benchmarks.panel
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import msgspec

from parallel_backend.comm.meter import Meter
from parallel_backend.comm.timeline import BINS
from parallel_backend.diffusion import ModelSpec
from parallel_backend.host.runs.timeline import timeline_of
from parallel_backend.host.workers.channel import Heard
from parallel_backend.host.workers.status import BackendStatus, GroupStatus, rank_statuses
from parallel_backend.wire.to_host import HeartbeatReply, ModelOnDevice, RankCostReply, RankTimings
from tests.support.plans import cpu_plan

RANKS = 16
WAITS = 57 * 2
KINDS = ("ulysses", "ring", "weights", "control")
MODEL = ModelSpec("comfyui", "/models/flux1-dev.safetensors", 0, 0, "bfloat16")


def milliseconds(work: Callable[[int], object], times: int) -> float:
    """CPU time of one call, in this thread."""
    began = time.thread_time()
    for number in range(times):
        work(number)
    return 1e3 * (time.thread_time() - began) / times


def report(rank: int) -> RankCostReply:
    """A long run's report, in which a rank waited in every bin."""
    waiting = {kind: [10_000 * ((rank + at) % 5) for at in range(BINS)] for kind in KINDS}
    times = RankTimings(
        64.0, 0.25, waiting, [("loading the model", 0.0), ("sampling", 8.0)], [float(at) for at in range(50)]
    )
    costs = dict.fromkeys(("read", "weights", "cache", "peak", "on_host", "restored"), 0)
    return RankCostReply(
        request=1,
        rank=rank,
        seconds=56,
        waiting=9,
        sent={},
        models_on_device=[ModelOnDevice(MODEL, 1 << 30)],
        times=times,
        **costs,
    )


def main() -> None:
    """Print the figures."""
    meter = Meter()

    def bare(number: int) -> None:
        for _ in range(WAITS):
            began = time.perf_counter()
            meter._blocked += time.perf_counter() - began

    def noted(number: int) -> None:
        for _ in range(WAITS):
            with meter.wait("ulysses"):
                pass

    reports = {rank: report(rank) for rank in range(RANKS)}
    devices = [f"cuda:{rank}" for rank in range(RANKS)]

    def look(number: int) -> str:
        heard = {
            rank: Heard(HeartbeatReply("sampling", number, number, rank % 2 == 0), 0.0, 0.0) for rank in range(RANKS)
        }
        status = BackendStatus([GroupStatus("running", "flux1-dev", rank_statuses(devices, heard, reports))], 1, None)
        assert status != BackendStatus([], 0, None)
        return json.dumps(msgspec.to_builtins(status))

    plan = cpu_plan(ring=4, ulysses=4)
    step = milliseconds(noted, 500) - milliseconds(bare, 500)
    record = milliseconds(lambda _: msgspec.json.encode(timeline_of(plan, list(reports.values()))), 20)
    print("| | |\n|---|---:|")
    print(f"| a worker, each step: {WAITS} waits on the timeline | {step:.2f} ms |")
    print(f"| ComfyUI, each second while the tab is open: {RANKS} ranks | {milliseconds(look, 200):.2f} ms |")
    print(f"| ComfyUI, once a run while the tab is open: the timeline of {RANKS} ranks | {record:.0f} ms |")


if __name__ == "__main__":
    main()
