"""Measure one job in stock ComfyUI, and with this pack on 1, 2, 4 and 8 GPUs, as many as there are.

The measurements run one after the other, each in a ComfyUI of its own that ends before the next one starts. Each runs the job
twice: the first job loads the model, and the second is timed. The job is a small one that comes with this pack, or a graph of
yours. A graph is exported by File > Export (API), or is a picture that ComfyUI saved. If the benchmark is interrupted, the
results so far are kept.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import markdown
from ..doctor.__main__ import comfyui
from ..doctor.observations import measured
from ..errors import Refused
from ..gpus import visible_gpus
from ..host import Backend, Deadlines
from ..plan.__main__ import positive, size
from ..plan.predict.measure import Machine
from ..sprites import sprites
from ..temporary import OwnedFolder
from .cards import check_free
from .graphs import NotMeasured, changed, read_graph, stock
from .measure import in_a_bar
from .peaks import watched_gpus, watched_memory
from .record import HEAD, Record, encoded, row, table
from .server import GRAPH, Server, make_base
from .sides import Bench, IdleServer, file_of, plans_of, sides, started, usual_devices

STARTING = 1800.0
"""Seconds that a ComfyUI may take to start. Other packs install their requirements during the start."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    line = argparse.ArgumentParser(
        prog="python -m parallel_backend.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    line.add_argument(
        "--graph", type=Path, help="the graph to measure, with ComfyUI's or this pack's loaders (default: a small one)"
    )
    line.add_argument(
        "--model", default="", help="another file for the graph's diffusion model, as its loader lists it"
    )
    line.add_argument("--size", type=size, help="WIDTHxHEIGHT or WIDTHxHEIGHTxFRAMES (default: the graph's)")
    line.add_argument("--steps", type=positive, default=0, help="the number of steps (default: the graph's)")
    line.add_argument(
        "--devices",
        nargs="+",
        help=(
            "the devices of one or more plans, such as 0 0,1 or cpu:2 (default: 1, 2, 4 and 8 of this machine's GPUs; "
            "without GPUs cpu:1 and cpu:2)"
        ),
    )
    line.add_argument("--comfyui", type=Path, default=Path(comfyui()), help="ComfyUI's folder (default: %(default)s)")
    line.add_argument(
        "--out", type=Path, default=Path(), help="the folder for the result (default: the current folder)"
    )
    line.add_argument("arguments", nargs="*", help="ComfyUI's own arguments, after --, such as -- --fast")
    return line


@dataclass(frozen=True)
class Servers:
    """A starter of one ComfyUI for each side, in a folder of its own.

    Attributes:
        comfyui: ComfyUI's folder.
        arguments: ComfyUI's command-line arguments.
        files: the files that this pack brings along for its own graph.
        folder: the parent of the ComfyUIs' folders.
    """

    bench: Bench
    comfyui: Path
    arguments: tuple[str, ...]
    files: tuple[tuple[str, Path], ...]
    folder: Path

    @contextmanager
    def idle(self) -> Iterator[IdleServer]:
        """Start a ComfyUI, and yield it with the peaks of its memory. Raises NotMeasured, ComfyUIError."""
        base = Path(tempfile.mkdtemp(dir=self.folder))
        make_base(base, self.comfyui, self.files)
        without_gpu = () if self.bench.used else ("--cpu",)
        inputs = () if self.files else ("--input-directory", str(self.comfyui / "input"))
        check_free(self.bench.gpus, self.bench.used)
        watched = watched_gpus(self.bench.names) if self.bench.used else watched_memory()
        args = (*without_gpu, *inputs, *self.arguments)
        with watched as peaks, Server(self.comfyui, base, args=args, patience=STARTING) as server:
            yield IdleServer(server, peaks)


def bench_of(options: argparse.Namespace) -> Bench:
    """Return the benchmark of a command line. Raises NotMeasured, Refused."""
    if not (options.comfyui / "main.py").is_file():
        raise NotMeasured(f"{options.comfyui} is not ComfyUI's folder: name it with --comfyui.")
    if not options.out.is_dir():
        raise NotMeasured(f"{options.out} is not a folder: create it, or name another with --out.")
    shape = (options.size.width, options.size.height, options.size.frames) if options.size else None
    path = options.graph or GRAPH
    graph = changed(stock(read_graph(path)), model=options.model, size=shape, steps=options.steps)
    gpus = visible_gpus() if torch.cuda.is_available() else ()
    texts = options.devices or usual_devices(len(gpus))
    if remote_devices := [text for text in texts if "://" in text]:
        raise NotMeasured(f"{remote_devices[0]} are other machines' devices: name some of this machine with --devices.")
    bench = Bench(graph, path.stem, plans_of(texts, len(gpus)), gpus)
    check_free(gpus, bench.used)
    return bench


def link_speeds(bench: Bench) -> Machine | None:
    """Return the speeds that workers on the most devices measure, or None if they cannot."""
    backend = Backend(Deadlines(silence=30, stall=60))
    try:
        return measured(backend, bench.most).machine
    finally:
        backend.close()


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure. Return 0, or 1 if nothing could be measured, or 130 if the benchmark was interrupted."""
    record: Record | None = None
    options = parser().parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # the signal then stops ComfyUI as Ctrl-C does
    ended = 0
    try:
        bench = bench_of(options)
        with OwnedFolder(tempfile.gettempdir(), "bench-") as folder:
            files = () if options.graph else tuple(sprites())
            servers = Servers(bench, options.comfyui, tuple(options.arguments), files, folder)
            _say("measuring the links")
            begun = started(bench, options.comfyui, link_speeds(bench))
            for record in sides(bench, begun, servers.idle, _say, in_a_bar):
                file_of(record, options.out).write_bytes(encoded(record))
    except (NotMeasured, Refused) as error:
        print(f"python -m parallel_backend.bench: {error}", file=sys.stderr)
        ended = 1
    except KeyboardInterrupt:
        _say("interrupted: the finished measurements are kept.")
        ended = 130
    if record is not None:
        ended = ended or int(all(side.failed for side in record.sides))
        print(f"\n{table(record)}\n\n{markdown.table(HEAD, [row(record)])}\nKept in {file_of(record, options.out)}")
    return ended


if __name__ == "__main__":
    sys.exit(main())
