"""The sides of a benchmark, in turn: stock ComfyUI, then this pack's plans. Each runs in a ComfyUI that has nothing loaded."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
from torch import Tensor

from ..doctor.observations import peers
from ..gpus import Gpu
from ..plan.devices import named_devices
from ..plan.predict.measure import Machine
from .cards import commit, processor, versions
from .client import Client, ComfyUIError, Graph
from .graphs import Ask, described, model_files, ours, staying
from .measure import Show, measure
from .peaks import Peaks
from .record import COUNTS, STOCK, BenchJob, Card, Record, Side, machine_of

Plans = tuple[tuple[str, tuple[str, ...]], ...]
"""Devices of plans as the user writes them, with the workers that they name."""


@dataclass(frozen=True)
class Bench:
    """A benchmark to run: a stock graph, its name, the plans' devices, and this machine's GPUs."""

    graph: Graph
    name: str
    plans: Plans
    gpus: tuple[Gpu, ...]

    @property
    def used(self) -> list[int]:
        """Return the indices of the GPUs that take part. Stock ComfyUI uses the first GPU that torch sees."""
        named = {device for _, devices in self.plans for device in devices if device != "cpu"}
        return sorted({int(device.removeprefix("cuda:")) for device in named} | ({0} if named else set()))

    @property
    def names(self) -> dict[str, str]:
        """Return the names of the GPUs that take part, by their UUIDs."""
        return {self.gpus[index].uuid: f"cuda:{index}" for index in self.used}

    @property
    def most(self) -> tuple[str, ...]:
        """Return the devices of the plan that has the most."""
        return max((devices for _, devices in self.plans), key=len)


@dataclass(frozen=True)
class IdleServer:
    """A ComfyUI that has nothing loaded, and the peaks of its memory from now on."""

    client: Client
    peaks: Peaks


def usual_devices(gpus: int) -> list[str]:
    """Return the devices of 1, 2, 4 and 8 GPUs, as many as there are. Without a GPU, return one and two CPU workers."""
    counts = [count for count in COUNTS if count <= gpus]
    return ["0" if count == 1 else f"0-{count - 1}" for count in counts] or ["cpu:1", "cpu:2"]


def plans_of(texts: Sequence[str], gpus: int) -> Plans:
    """Return plans' devices with the workers that they name, on a machine with so many GPUs. Raises Refused."""
    return tuple((text, named_devices(text, gpus)) for text in texts)


def started(bench: Bench, comfyui: Path, links: Machine | None) -> Record:
    """Return the record before the first side.

    Args:
        comfyui: ComfyUI's folder.
        links: speeds that workers on the most devices have measured, or None if they could not.
    """
    shape, steps = described(bench.graph)
    used = bench.used
    reach = {pair for pair in peers(len(bench.gpus)) if set(pair) <= set(used)}
    return Record(
        day=datetime.date.today().isoformat(),
        job=BenchJob(bench.name, model_files(bench.graph), shape, steps),
        cards=[Card(bench.gpus[index].name, bench.gpus[index].memory) for index in used],
        processor=processor(),
        cores=psutil.cpu_count() or 0,
        memory=psutil.virtual_memory().total,
        links=links,
        peers=len(reach) // 2,
        versions=versions(comfyui),
        commit=commit(),
        sides=[],
    )


def sides(
    bench: Bench,
    record: Record,
    idle: Callable[[], AbstractContextManager[IdleServer]],
    say: Callable[[str], None],
    show: Show,
) -> Iterator[Record]:
    """Yield the record after each side: stock ComfyUI, then each plan. A side that fails is recorded with its reason.

    Args:
        idle: starts the server of one side. It is called once for each side.
        say: receives messages about the progress.
        show: shows the steps of a job.

    Raises:
        NotMeasured: a GPU is not free, or the graph's model has to stay on one GPU.
        Cancelled: a job was interrupted.
    """
    reference: Tensor | None = None
    stays: dict[str, str] = {}
    for text, devices in (("", ()), *bench.plans):
        name = text or STOCK
        say(f"{name}: starting")
        peaks = Peaks()
        try:
            with idle() as at:
                peaks = at.peaks
                if not text:
                    stays = staying(bench.graph, _judge(at.client))
                    job = msgspec.structs.replace(record.job, left=list(stays.values()))
                    record = msgspec.structs.replace(record, job=job)
                graph = ours(bench.graph, text, stays) if text else bench.graph
                done = measure(at.client, name, graph, len(devices), reference, show)
            side = done.side
            reference = reference if text else done.latent
        except (ComfyUIError, TimeoutError) as error:
            side = Side(name, len(devices), failed=str(error).splitlines()[0])
            say(side.failed)
        side = msgspec.structs.replace(side, peak=peaks.growth)
        record = msgspec.structs.replace(record, sides=[*record.sides, side])
        yield record


def _judge(client: Client) -> Ask:
    """Return a function that asks a ComfyUI's pack which loaders have to stay."""
    return lambda loaders: [judgement["why"] for judgement in client.ask("/parallel/loaders", loaders)]


def file_of(record: Record, out: Path) -> Path:
    """Return the path of a record's file. A record of the same day, machine and job replaces it."""
    title = f"{record.day} {machine_of(record)} {' '.join(record.job.files)} {record.job.size}"
    return out / f"{re.sub('[^a-z0-9]+', '-', title.lower()).strip('-')}.json"
