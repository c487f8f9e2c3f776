"""Measure one job in stock ComfyUI and with this pack on 1, 2, 4 and 8 GPUs, as there are, one after the other.

Each is done twice in a ComfyUI of its own, which has ended before the next one starts: the first job loads, the second is timed.
The job is a small one that this pack brings along, or a graph of yours: exported by File > Export (API), or a picture that
ComfyUI saved. What is done so far is kept when it is interrupted.
"""

from __future__ import annotations

import argparse
import datetime
import re
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import torch
from torch import Tensor

from .. import markdown
from ..doctor.__main__ import comfyui
from ..doctor.observations import measured, peers
from ..errors import Refused
from ..gpus import Gpu, visible_gpus
from ..host import Backend, Deadlines
from ..plan.__main__ import positive, size
from ..plan.devices.names import named_devices
from ..plan.predict.measure import Machine
from ..sprites import sprites
from .cards import check_free, commit, processor, versions
from .client import ComfyUIError, Graph
from .graphs import NotMeasured, changed, described, model_files, ours, read_graph, staying, stock
from .measure import measure
from .peaks import Peaks, watched_gpus, watched_memory
from .places import GRAPH, make_base
from .record import COUNTS, HEAD, STOCK, Card, Job, Record, Side, encoded, machine_of, row, table
from .server import Server

STARTING = 1800.0
"""Seconds that a ComfyUI may take to start: other packs install what they need."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    line = argparse.ArgumentParser(
        prog="python -m parallel_backend.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    line.add_argument(
        "--graph", type=Path, help="the job, with the stock loaders or this pack's (default: a small one)"
    )
    line.add_argument(
        "--model", default="", help="another file for the graph's diffusion model, as its loader lists it"
    )
    line.add_argument("--size", type=size, help="WIDTHxHEIGHT or WIDTHxHEIGHTxFRAMES (default: the graph's)")
    line.add_argument("--steps", type=positive, default=0, help="default: the graph's")
    line.add_argument(
        "--devices",
        nargs="+",
        help="one or more plans' devices, such as 0 0,1 or cpu:2 (default: 1, 2, 4 and 8 GPUs, as there are; cpu:1 and cpu:2 "
        "without one)",
    )
    line.add_argument("--comfyui", type=Path, default=Path(comfyui()), help="ComfyUI's folder (default: %(default)s)")
    line.add_argument("--out", type=Path, default=Path(), help="the folder for the result (default: this one)")
    line.add_argument("arguments", nargs="*", help="behind --: what ComfyUI is started with, such as -- --fast")
    return line


@dataclass(frozen=True)
class Bench:
    """What is measured, where: a stock graph, plans' devices with the workers that each names, GPUs, and how ComfyUI is started.

    `files` are those that this pack brings along for its own graph.
    """

    graph: Graph
    name: str
    plans: tuple[tuple[str, tuple[str, ...]], ...]
    gpus: tuple[Gpu, ...]
    comfyui: Path
    arguments: tuple[str, ...]
    out: Path
    files: tuple[tuple[str, Path], ...]

    @property
    def used(self) -> list[int]:
        """The indices of the GPUs that take part; stock ComfyUI takes the first that torch sees."""
        named = {device for _, devices in self.plans for device in devices if device != "cpu"}
        return sorted({int(device.removeprefix("cuda:")) for device in named} | ({0} if named else set()))

    def watched(self) -> AbstractContextManager[Peaks]:
        """The peaks of what takes part while something is done."""
        names = {self.gpus[index].uuid: f"cuda:{index}" for index in self.used}
        return watched_gpus(names) if names else watched_memory()

    def server(self, base: Path) -> Server:
        """A ComfyUI to be started."""
        without_gpu = () if self.used else ("--cpu",)
        inputs = () if self.files else ("--input-directory", str(self.comfyui / "input"))
        return Server(self.comfyui, base, args=(*without_gpu, *inputs, *self.arguments), patience=STARTING)


def bench_of(options: argparse.Namespace) -> Bench:
    """What a command line asks for. Raises NotMeasured, Refused."""
    if not (options.comfyui / "main.py").is_file():
        raise NotMeasured(f"{options.comfyui} is not ComfyUI's folder: name it with --comfyui.")
    if not options.out.is_dir():
        raise NotMeasured(f"{options.out} is no folder: make it, or name another with --out.")
    shape = (options.size.width, options.size.height, options.size.frames) if options.size else None
    path = options.graph or GRAPH
    graph = changed(stock(read_graph(path)), model=options.model, size=shape, steps=options.steps)
    gpus = visible_gpus() if torch.cuda.is_available() else ()
    texts = options.devices or (
        [_first(count) for count in COUNTS if count <= len(gpus)] if gpus else ["cpu:1", "cpu:2"]
    )
    if others := [text for text in texts if "://" in text]:
        raise NotMeasured(f"{others[0]} are other machines' devices: name some of this machine with --devices.")
    plans = tuple((text, named_devices(text, len(gpus))) for text in texts)
    files = () if options.graph else tuple(sprites())
    found = Bench(graph, path.stem, plans, gpus, options.comfyui, tuple(options.arguments), options.out, files)
    check_free(gpus, found.used)
    return found


def _first(count: int) -> str:
    """So many GPUs as a plan's devices."""
    return "0" if count == 1 else f"0-{count - 1}"


def link_speeds(bench: Bench) -> Machine | None:
    """What workers on the most devices measure of them, None where they cannot."""
    backend = Backend(Deadlines(silence=30, stall=60))
    try:
        return measured(backend, max((devices for _, devices in bench.plans), key=len)).machine
    finally:
        backend.close()


def started(bench: Bench) -> Record:
    """The record before the first side."""
    shape, steps = described(bench.graph)
    used = bench.used
    reach = {pair for pair in peers(len(bench.gpus)) if set(pair) <= set(used)}
    return Record(
        day=datetime.date.today().isoformat(),
        job=Job(bench.name, model_files(bench.graph), shape, steps),
        cards=[Card(bench.gpus[index].name, bench.gpus[index].memory) for index in used],
        processor=processor(),
        cores=psutil.cpu_count() or 0,
        memory=psutil.virtual_memory().total,
        links=link_speeds(bench),
        peers=len(reach) // 2,
        versions=versions(bench.comfyui),
        commit=commit(),
        sides=[],
    )


def sides(bench: Bench, folder: Path, record: Record) -> Iterator[Record]:
    """The record after each side: stock ComfyUI, then each plan. A side that fails is in it with its reason."""
    beside: Tensor | None = None
    stays: dict[str, str] = {}
    for number, (text, devices) in enumerate((("", ()), *bench.plans)):
        name = text or STOCK
        _say(f"{name}: starting a ComfyUI")
        base = folder / str(number)
        base.mkdir()
        make_base(base, bench.comfyui, bench.files)
        check_free(bench.gpus, bench.used)
        with bench.watched() as peaks:
            try:
                with bench.server(base) as server:
                    if not text:
                        stays = staying(bench.graph, lambda asked: list(server.ask("/parallel/loaders", asked)))
                        record = msgspec.structs.replace(record, job=_left(record.job, stays))
                    graph = ours(bench.graph, text, stays) if text else bench.graph
                    done = measure(server, name, graph, len(devices), beside)
                side = done.side
                beside = beside if text else done.latent
            except (ComfyUIError, TimeoutError) as error:
                side = Side(name, len(devices), failed=str(error).splitlines()[0])
                _say(side.failed)
        side = msgspec.structs.replace(side, peak=peaks.taken)
        record = msgspec.structs.replace(record, sides=[*record.sides, side])
        yield record


def _left(job: Job, stays: dict[str, str]) -> Job:
    return msgspec.structs.replace(job, left=list(stays.values()))


def file_of(record: Record, out: Path) -> Path:
    """Where a record is kept; one of the same day, machine and job takes its place."""
    words = f"{record.day} {machine_of(record)} {' '.join(record.job.files)} {record.job.size}"
    return out / f"{re.sub('[^a-z0-9]+', '-', words.lower()).strip('-')}.json"


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; 0, or 1 where nothing could be, and 130 where it was interrupted."""
    record: Record | None = None
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # so that ComfyUI is stopped as by Ctrl-C
    ended = 0
    try:
        bench = bench_of(parser().parse_args(arguments))
        with tempfile.TemporaryDirectory(prefix="comfyui-parallel-bench-") as folder:
            _say("measuring the links")
            for record in sides(bench, Path(folder), started(bench)):
                file_of(record, bench.out).write_bytes(encoded(record))
    except (NotMeasured, Refused) as error:
        print(f"python -m parallel_backend.bench: {error}", file=sys.stderr)
        ended = 1
    except KeyboardInterrupt:
        _say("interrupted: what was done before is kept.")
        ended = 130
    if record is not None:
        ended = ended or int(all(side.failed for side in record.sides))
        print(f"\n{table(record)}\n\n{markdown.table(HEAD, [row(record)])}\nKept in {file_of(record, bench.out)}")
    return ended


if __name__ == "__main__":
    sys.exit(main())
