"""Measures the cost of loading on each worker: memory, and bytes read by the worker's count and by the kernel's."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from parallel_backend.plan import ResolvedPlan
from tests.engine.conftest import Job, Runner, sigmas


@dataclass(frozen=True)
class Cost:
    """The cost of loading on one rank, in bytes.

    `weights` is what the rank holds afterwards. `counted` is the bytes read by the rank's own count. `asked` is the bytes that
    the rank requested from files (rchar of /proc/PID/io). `disk` is the bytes that came from the disk (read_bytes). `above` is
    the peak of resident memory above the idle value.
    """

    weights: int
    counted: int
    asked: int
    disk: int
    above: int


def field(pid: int, file: str, name: str) -> int:
    """Return the field `name` of /proc/PID/`file`, in bytes."""
    lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    words = next(line for line in lines if line.startswith(f"{name}:")).split()
    return int(words[1]) * (1024 if words[-1] == "kB" else 1)


def forget(file: Path) -> None:
    """Drop a file from the page cache, so that the next reads come from the disk."""
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def loading_costs(run: Runner, first: Path, file: Path, plan: ResolvedPlan) -> list[Cost]:
    """Load `first`, which makes the workers ready, then load `file` and return its cost on each rank, taken before sampling.

    Args:
        run: a runner whose workers have run this plan only, because the measured peak is that of their lifetime.
    """
    run(Job(first, sigmas(1)), plan)
    workers = run.workers()
    names = (("status", "VmRSS"), ("io", "rchar"), ("io", "read_bytes"))
    before = [[field(pid, *name) for name in names] for pid in workers]
    peaks: list[int] = []

    def on_loading(done: int, total: int) -> None:
        if done == total:  # before sampling, which gathers shards
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
