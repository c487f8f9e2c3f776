"""What loading costs each worker: bytes read, as it counts them and as the kernel does, and memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from parallel_backend.plan import ResolvedPlan
from tests.engine.conftest import Job, Runner, sigmas


@dataclass(frozen=True)
class Cost:
    """One rank's; all in bytes.

    `weights` is what it holds afterwards, `counted` what it says it has read, `asked` what it has asked its files for
    (rchar of /proc/PID/io), `disk` what came from the disk for it (read_bytes), `above` the peak of its resident memory
    above what it had when idle.
    """

    weights: int
    counted: int
    asked: int
    disk: int
    above: int


def field(pid: int, file: str, name: str) -> int:
    """A number from /proc/PID/`file`, in bytes."""
    lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    words = next(line for line in lines if line.startswith(f"{name}:")).split()
    return int(words[1]) * (1024 if words[-1] == "kB" else 1)


def forget(file: Path) -> None:
    """Make the next reads of a file come from the disk."""
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def loading_costs(run: Runner, first: Path, file: Path, plan: ResolvedPlan) -> list[Cost]:
    """Load a file after another one, which makes the workers ready; the costs by rank, taken before sampling.

    Args:
        run: whose workers are of this plan alone: the peak is their life's.
    """
    run(Job(first, sigmas(1)), plan)
    workers = run.workers()
    names = (("status", "VmRSS"), ("io", "rchar"), ("io", "read_bytes"))
    before = [[field(pid, *name) for name in names] for pid in workers]
    peaks: list[int] = []

    def on_loading(done: int, total: int) -> None:
        if done == total:  # before sampling, for which shards are gathered
            peaks.extend(field(pid, "status", "VmHWM") for pid in workers)

    forget(file)
    run(Job(file, sigmas(1)), plan, on_loading=on_loading)
    assert run.answer is not None
    reports = sorted(run.answer.reports, key=lambda report: report.rank)
    return [
        Cost(
            report.weights,
            report.read,
            field(pid, "io", "rchar") - asked,
            field(pid, "io", "read_bytes") - disk,
            peak - resident,
        )
        for pid, report, peak, (resident, asked, disk) in zip(workers, reports, peaks, before, strict=True)
    ]
