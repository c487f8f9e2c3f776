"""One side of a benchmark: a job that runs twice in a ComfyUI of its own, which has ended before the next side begins."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from ..clock import seconds_per_step
from ..distance import error_of
from ..errors import Cancelled
from .client import Client, ComfyUIError, Graph, QueuedRun, StepProgress
from .graphs import LATENT, described, reseeded, samplers, with_latent
from .record import Phases, Side

PATIENCE = 6 * 3600.0
"""Seconds that a job may take."""

Steps = Callable[[int, int], None]
"""A callback that receives the number of a job's finished steps, and the number of all its steps."""

Show = Callable[[str, int], AbstractContextManager[Steps]]
"""Shows a job's steps while they run. The arguments are the job's title, and its number of steps as far as the graph says."""


@contextlib.contextmanager
def in_a_bar(title: str, steps: int) -> Iterator[Steps]:
    """Show a job's steps on the terminal."""
    layout = "{desc} {bar:30} {n:>3}/{total} {elapsed}"
    with tqdm(total=steps, desc=f"{title:<34}", bar_format=layout) as bar:

        def tell(done: int, steps: int) -> None:
            bar.total = steps
            bar.update(done - bar.n)

        yield tell


@dataclass(frozen=True)
class MeasuredSide:
    """A side, and the latent of its second job."""

    side: Side
    latent: Tensor


def measure(
    client: Client, name: str, graph: Graph, devices: int, reference: Tensor | None, show: Show = in_a_bar
) -> MeasuredSide:
    """Run a graph's job twice in a ComfyUI that has nothing loaded.

    Args:
        devices: number of the plan's devices; 0 for stock ComfyUI.
        reference: stock ComfyUI's latent, or None if there is none.

    Raises:
        ComfyUIError: a job fails. The message has the reason.
        Cancelled: a job was interrupted.
    """
    graph = with_latent(graph)
    names = samplers(graph)
    first = follow(client, f"{name}, first", reseeded(graph), names, show)
    then = follow(client, f"{name}, then", graph, names, show)
    (file,) = client.files(then, LATENT)
    latent = load_file(file)["latent_tensor"].double()
    error = error_of(latent, reference) if devices and reference is not None else None
    if error is not None and not math.isfinite(error):
        raise ComfyUIError(
            f"{name}: the latent has another shape than stock ComfyUI's, or holds NaN or infinite values"
        )
    outcomes = _outcomes(client, then, names)
    side = Side(
        name=name,
        devices=devices,
        plan=", ".join(dict.fromkeys(outcome["plan"] for outcome in outcomes)),
        step=seconds_per_step(step_times(then, names)),
        first=phases(first, names),
        then=phases(then, names),
        sent=sum(outcome["sent"] for outcome in outcomes),
        error=error,
    )
    return MeasuredSide(side, latent)


def follow(client: Client, title: str, graph: Graph, names: Collection[str], show: Show = in_a_bar) -> QueuedRun:
    """Queue a graph and show its samplers' steps while they run. Raises ComfyUIError, Cancelled as `measure` does.

    Args:
        names: ids of the samplers.
    """
    reached: dict[str, StepProgress] = {}
    steps = described(graph)[1]
    with show(title, steps) as tell:

        def on_progress(progress: StepProgress) -> None:
            if progress.node in names:
                reached[progress.node] = progress
                every = reached.values()
                tell(sum(node.value for node in every), max(steps, sum(node.max for node in every)))

        run = client.queue(graph, on_progress=on_progress, timeout=PATIENCE)
    if run.status == "interrupted":
        raise Cancelled("it was cancelled.")
    if run.status != "success":
        raise ComfyUIError(f"{title}: {run.error.exception_message if run.error else run.status}")
    if not reached:
        raise ComfyUIError(f"{title}: no step was reported")
    return run


def step_times(run: QueuedRun, names: Collection[str]) -> list[list[float]]:
    """Return the times at which the steps of each sampler were done, in seconds of one clock."""
    times: dict[str, list[float]] = defaultdict(list)
    reached: dict[str, int] = {}
    for progress in run.progress:
        if progress.node in names and progress.value > reached.get(progress.node, 0):
            reached[progress.node] = progress.value
            times[progress.node].append(progress.time)
    return list(times.values())


def phases(run: QueuedRun, names: Collection[str]) -> Phases:
    """Return the seconds of a run that has succeeded."""
    steps = sorted(time for times in step_times(run, names) for time in times)
    began = min(time for node, time in run.started.items() if node in names)
    return Phases(
        text=began - run.submitted,
        start=steps[0] - began,
        denoise=steps[-1] - steps[0],
        decode=run.ended - steps[-1],
    )


def _outcomes(client: Client, run: QueuedRun, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return this pack's outcome of each sampler's run (parallel_backend/host/runs/outcome.py); none for stock ComfyUI."""
    extra = client.history(run.prompt_id)["prompt"][3]
    published = extra.get("parallel", {})
    return [published[name] for name in names if name in published]
