"""One side of a benchmark: a job, done twice in a ComfyUI of its own, of which nothing is left before the next side begins."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from ..distance import error_of
from .client import ComfyUIError, Graph, Progress, Run
from .graphs import LATENT, described, reseeded, samplers, with_latent
from .record import Phases, Side
from .server import Server

PATIENCE = 6 * 3600.0
"""Seconds that a job may take."""


@dataclass(frozen=True)
class Measured:
    """A side, and the latent of its second job."""

    side: Side
    latent: Tensor


def measure(server: Server, name: str, graph: Graph, devices: int, beside: Tensor | None) -> Measured:
    """Do a graph's job twice in a ComfyUI that has just started. Raises ComfyUIError where it fails.

    Args:
        devices: of the plan; 0 for stock ComfyUI.
        beside: stock ComfyUI's latent, None where there is none.
    """
    graph = with_latent(graph)
    names = samplers(graph)
    first = follow(server, f"{name}, first", reseeded(graph), names)
    then = follow(server, f"{name}, then", graph, names)
    (file,) = server.files(then, LATENT)
    latent = load_file(file)["latent_tensor"].double()
    error = error_of(latent, beside) if devices and beside is not None else None
    if error is not None and not math.isfinite(error):
        raise ComfyUIError(f"{name}: the latent has another shape than stock ComfyUI's, or holds what is no number")
    told = _outcomes(server, then, names)
    side = Side(
        name=name,
        devices=devices,
        plan=", ".join(dict.fromkeys(each["plan"] for each in told)),
        step=pace(step_times(then, names)),
        first=phases(first, names),
        then=phases(then, names),
        sent=sum(each["sent"] for each in told),
        error=error,
    )
    return Measured(side, latent)


def follow(server: Server, title: str, graph: Graph, names: Collection[str]) -> Run:
    """Queue a graph and show its samplers' steps while they are made. Raises ComfyUIError where it fails, with the reason.

    Args:
        names: the samplers' ids.
    """
    layout = "{desc} {bar:30} {n:>3}/{total} {elapsed}"
    reached: dict[str, Progress] = {}
    steps = described(graph)[1]
    with tqdm(total=steps, desc=f"{title:<34}", bar_format=layout) as bar:

        def on_progress(progress: Progress) -> None:
            if progress.node in names:
                reached[progress.node] = progress
                bar.total = max(steps, sum(each.max for each in reached.values()))
                bar.update(sum(each.value for each in reached.values()) - bar.n)

        run = server.queue(graph, on_progress=on_progress, timeout=PATIENCE)
    if run.status != "success":
        raise ComfyUIError(f"{title}: {run.error.exception_message if run.error else run.status}")
    if not reached:
        raise ComfyUIError(f"{title}: no step was reported")
    return run


def step_times(run: Run, names: Collection[str]) -> list[list[float]]:
    """When each step of each sampler was done, in seconds of one clock."""
    times: dict[str, list[float]] = defaultdict(list)
    reached: dict[str, int] = {}
    for progress in run.progress:
        if progress.node in names and progress.value > reached.get(progress.node, 0):
            reached[progress.node] = progress.value
            times[progress.node].append(progress.time)
    return list(times.values())


def pace(times: Sequence[Sequence[float]]) -> float:
    """The median seconds of a step, of the moments at which the steps of each sampler were done; 0 where none has two."""
    return statistics.median([b - a for each in times for a, b in pairwise(each)] or [0.0])


def phases(run: Run, names: Collection[str]) -> Phases:
    """The seconds of a run that has succeeded."""
    steps = sorted(time for times in step_times(run, names) for time in times)
    began = min(time for node, time in run.started.items() if node in names)
    return Phases(
        text=began - run.submitted,
        start=steps[0] - began,
        denoise=steps[-1] - steps[0],
        decode=run.ended - steps[-1],
    )


def _outcomes(server: Server, run: Run, names: Sequence[str]) -> list[dict[str, Any]]:
    """What this pack says of each sampler's run (parallel_backend/host/runs/outcome.py); nothing for stock ComfyUI."""
    extra = server.history(run.prompt_id)["prompt"][3]
    told = extra.get("parallel", {})
    return [told[name] for name in names if name in told]
