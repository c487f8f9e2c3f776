"""The result of a benchmark: the file that is kept, and the tables that people read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from .. import markdown
from ..host.runs.outcome import amount
from ..plan.predict.measure import Machine

STOCK = "stock ComfyUI"
COUNTS = (1, 2, 4, 8)
"""Numbers of devices for which a row has a column."""

HEAD = (
    "machine",
    "job",
    "stock",
    *(f"on {count}" for count in COUNTS),
    "whole job",
    "peak a device",
    "sent",
    "error",
    "versions",
    "day",
)


class Phases(msgspec.Struct, frozen=True):
    """Seconds of a job, from the queue to its end.

    Attributes:
        text: until the first sampler's turn: encoding the prompt, and loading the text encoder.
        start: until the first step is done: loading the model, and starting workers if there are any.
        denoise: until the last step is done.
        decode: until the end.
    """

    text: float
    start: float
    denoise: float
    decode: float

    @property
    def whole(self) -> float:
        """Return the sum of all phases."""
        return self.text + self.start + self.denoise + self.decode


class Side(msgspec.Struct, frozen=True):
    """One way to run the job, in a ComfyUI of its own: twice, with another seed.

    Attributes:
        devices: number of devices; 0 for stock ComfyUI.
        step: median seconds of a step of the second job.
        first, then: times of the first and of the second job.
        peak: most bytes in use on each device.
        sent: bytes that the ranks sent in the second job.
        error: relative error (L2) of the second job's latent, compared with stock ComfyUI's. None if there is no such latent.
        failed: the reason why the side has no results; empty if it has.
    """

    name: str
    devices: int
    plan: str = ""
    step: float = 0.0
    first: Phases | None = None
    then: Phases | None = None
    peak: dict[str, int] = {}
    sent: int = 0
    error: float | None = None
    failed: str = ""


class Card(msgspec.Struct, frozen=True):
    """A GPU and the bytes of its memory."""

    name: str
    memory: int


class BenchJob(msgspec.Struct, frozen=True):
    """The job of a benchmark.

    Attributes:
        left: the reasons why loaders stayed ComfyUI's on all sides.
    """

    graph: str
    files: list[str]
    size: str
    steps: int
    left: list[str] = []


class Record(msgspec.Struct, frozen=True):
    """A benchmark.

    Attributes:
        links: speeds that workers measured of all devices together, or None if that failed.
        peers: number of pairs of GPUs that reach each other's memory.
    """

    day: str
    job: BenchJob
    cards: list[Card]
    processor: str
    cores: int
    memory: int
    links: Machine | None
    peers: int
    versions: dict[str, str]
    commit: str
    sides: list[Side]


def encoded(record: Record) -> bytes:
    """Return the content of a record's file."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def decoded(content: bytes) -> Record:
    """Decode the content of a record's file. Raises msgspec.DecodeError."""
    return msgspec.json.decode(content, type=Record)


def machine_of(record: Record) -> str:
    """Return the machine in a few words, such as `2 x NVIDIA GeForce RTX 4090`."""
    names = [card.name for card in record.cards]
    if not names:
        return f"{record.cores} CPU cores ({record.processor})" if record.processor else f"{record.cores} CPU cores"
    return ", ".join(
        f"{names.count(name)} x {name}" if names.count(name) > 1 else name for name in dict.fromkeys(names)
    )


def row(record: Record) -> tuple[str, ...]:
    """Return a record in the words of HEAD. Steps and jobs are the second ones, whose models are loaded."""
    done = [side for side in record.sides if not side.failed]
    by_count = {side.devices: side for side in record.sides}
    steps = [_cell(by_count.get(count)) for count in (0, *COUNTS)]
    job = record.job
    versions = record.versions
    errors = [side.error for side in done if side.devices and side.error is not None]
    return (
        machine_of(record),
        f"{', '.join(job.files)}, {job.size}, {job.steps} steps",
        *steps,
        _stock_and_fastest(done, lambda side: f"{side.then.whole:.1f} s" if side.then else ""),
        _stock_and_fastest(done, lambda side: amount(max(side.peak.values())) if side.peak else ""),
        amount(max((side.sent for side in done), default=0)),
        f"{max(errors):.1e}" if errors else "",
        f"ComfyUI {versions.get('comfyui', '')}, torch {versions.get('torch', '')}, {record.commit}",
        record.day,
    )


def line(record: Record) -> str:
    """Return a record's row in Markdown, for the page of measured rows."""
    return markdown.table(HEAD, [row(record)]).splitlines()[-1]


def _cell(side: Side | None) -> str:
    if side is None:
        return ""
    return "cannot" if side.failed else f"{side.step:.3g} s"


def _stock_and_fastest(sides: Sequence[Side], text_of: Callable[[Side], str]) -> str:
    """Return the texts of stock ComfyUI and of the fastest plan."""
    own = [side for side in sides if not side.devices]
    plans = sorted((side for side in sides if side.devices), key=lambda side: side.step)
    return " → ".join(text_of(side) for side in (*own[:1], *plans[:1]))


def table(record: Record) -> str:
    """Return a table of all sides of a record, for the user who waits for it."""
    head = ("", "s a step", "text", "start", "denoise", "decode", "first job", "next job", "peak", "sent", "error")
    rows = [_line(side) for side in record.sides]
    lines = (head, *rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(_aligned(line, widths) for line in lines)


def _aligned(line: Sequence[str], widths: Sequence[int]) -> str:
    """Align the first cell to the left and the other cells to the right."""
    first, *rest = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
    return "  ".join((first.lstrip().ljust(widths[0]), *rest)).rstrip()


def _line(side: Side) -> tuple[str, ...]:
    name = side.name if not side.plan else f"{side.name} ({side.plan})"
    if side.first is None or side.then is None:
        return (f"{name}: {side.failed}", *[""] * 10)
    then = side.then
    return (
        name,
        f"{side.step:.4g}",
        *(f"{seconds:.2f}" for seconds in (side.first.text, side.first.start, then.denoise, then.decode)),
        *(f"{phases.whole:.2f}" for phases in (side.first, then)),
        amount(max(side.peak.values(), default=0)),
        amount(side.sent),
        "" if side.error is None else f"{side.error:.1e}",
    )
