"""Compares the cost model with published measurements, and writes docs/measured/plan-predictions.md.

    python -m benchmarks.predictions           # write the page
    python -m benchmarks.predictions --fit     # print the constants that the fitted rows give

The measurements are in published.json. Each constant of the cost model that was fitted on them has a physical meaning, and was
fitted on the rows of FITTED cards alone. The page tells the errors of all other rows apart.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from parallel_backend import markdown
from parallel_backend.mesh_axes import mesh_degrees
from parallel_backend.plan import ParallelPlan, Workload, candidates
from parallel_backend.plan.choose import rank
from parallel_backend.plan.offers import with_weights
from parallel_backend.plan.predict.certainty import ERRORS, kind_of
from parallel_backend.plan.predict.known_machines import on_links, profile
from parallel_backend.plan.predict.known_models import known_model
from parallel_backend.plan.predict.profiles import DenoiseJob, Device, Profile

DATA = Path(__file__).with_name("published.json")
PAGE = Path(__file__).parents[1] / "docs" / "measured" / "plan-predictions.md"

LIMITED = ("a100", "b200", "h100")
"""Cards whose long runs are slowed by their power limit. `CardProfile.reached` is fitted on their rows."""

FITTED = (*LIMITED, "l40")
"""Cards on whose rows constants were fitted."""

OURS = "ComfyUI"
"""The stack whose kernels are ours. Each other stack's one-GPU row gives a factor for its rows on several GPUs."""

FAR = 0.4
"""The relative error from which on a row must say why."""

SAGE = 1.9
"""The rate of SageAttention 2 as a multiple of FlashAttention 2's, by its own plots."""

FLASH2 = {"h100": 339e12, "h200": 339e12, "h20": 90e12}
"""FLOP/s of FlashAttention 2 on cards that have a faster kernel, by SageAttention's plots."""

BESIDE = {
    "cogvideox": 0.3,
    "hunyuan": 0.47,
    "minimax": 0.009,
    "wan": 0.147,
}
"""Seconds of text encoder and VAE for each megapixel on an H100, for times of whole requests. Pictures take PICTURE seconds.

They are the differences of sources that tell both times (SGLang, vLLM-Omni), and, of CogVideoX, what its one-GPU rows leave.
"""

PICTURE = 0.1


NOTES = """\
The cost model has few constants, and each has a physical meaning:

- **Of a card** (`cards.json`): the rates of a matmul and of attention that run alone for a short time, as others measured them,
  and the memory's speed by the data sheet. The origin stands beside each.
- **Fitted**: the share of such a rate that a whole model reaches, 0.77 on A100, H100 and B200, whose power limit slows long runs
  (taken for the H200 too), and 0.93 on the L40 (taken for all other cards); and the bandwidth of PCIe 4, on the L40's rows. A
  copy through host memory is taken to reach two thirds of it. NVLink's latency and a hop's idle time were fitted on two H100.
- **Counted**: kernels of a block and what they read and write (`tests/dry`), and the bytes of each exchange.
- **Measured**: the host time of a kernel, on the computer of one H200.

Another stack's kernels differ from ours. Its row on one GPU gives a factor, and its rows on several GPUs are predicted from that.
ComfyUI's kernels are ours, so its rows have no factor.

The plan command shows a range: 80 % of ComfyUI's rows above are within it, by the kind of weights
(`parallel_backend/plan/predict/certainty.py`).
"""

TABLE_NOTES = """\
The error of seconds is empty where the row itself gives the factor of its stack. Times of whole requests count text encoder and
VAE, by an assumption for each model (`BESIDE` in `benchmarks/predictions.py`). Each error above 40 % has its reason.
"""


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A published time.

    Attributes:
        stack: the software that was measured.
        model: the name of a known model.
        size: width and height in pixels, and frames.
        card: the name of a known card.
        gpus: the number of GPUs.
        seconds: the published seconds.
        counts: what was timed: a "step", the "denoise" of all steps, or "all" of a request.
        source: the page that has the time.
        date: the month of the page; empty if unknown.
        steps: the number of steps.
        dtype: the dtype of the weights, a key of `offers.WEIGHT_BYTES`.
        cfg: each step has a negative branch.
        batch: pictures at a time.
        plan: the degrees above 1, such as "cfg 2 x ulysses 4".
        exchange: the format of exchanged tensors.
        compiled: the blocks were compiled.
        attention: the kernel of attention; empty if the source does not say.
        weights: how the weights are held.
        links: a key of `known_machines.LINKS`; empty for the card's usual links.
        why: the reason of a prediction that is far off.
    """

    stack: str
    model: str
    size: tuple[int, int, int]
    card: str
    gpus: int
    seconds: float
    counts: str
    source: str
    date: str = ""
    steps: int = 1
    dtype: str = "bf16"
    cfg: bool = False
    batch: int = 1
    plan: str = ""
    exchange: str = "exact"
    compiled: bool = False
    attention: str = ""
    weights: str = "replicated"
    links: str = ""
    why: str = ""

    @property
    def series(self) -> tuple[object, ...]:
        """Return the key that rows of one job on one and on several GPUs share."""
        return (
            self.source, self.stack, self.model, self.size, self.steps, self.cfg, self.dtype, self.card, self.compiled,
            self.attention, self.counts,
        )  # fmt: skip

    @property
    def fitted(self) -> bool:
        """Return True if a constant was fitted on this row."""
        return self.card in FITTED

    @property
    def job(self) -> str:
        """Return the job in words."""
        width, height, frames = self.size
        area = f"{width}x{height}" + (f"x{frames}" if frames > 1 else "")
        words = [self.dtype, "cfg" * self.cfg, "compiled" * self.compiled, self.attention]
        words += [f"exchange {self.exchange}"] if self.exchange != "exact" else []
        words += [f"weights {self.weights}"] if self.weights != "replicated" else []
        steps = (
            "a step" if self.counts == "step" else f"{self.steps} steps" + ", whole request" * (self.counts == "all")
        )
        return f"{self.model} {area}, {steps}; " + ", ".join(filter(None, words))


class LeftOut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Published times that no row has, and the reason."""

    source: str
    stack: str
    rows: int
    reason: str


class Published(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All published times that were found."""

    rows: tuple[Row, ...]
    left_out: tuple[LeftOut, ...]


@functools.cache
def published() -> Published:
    """Return the published times."""
    return msgspec.json.decode(DATA.read_bytes(), type=Published)


def machine_of(row: Row, bandwidth: float = 0.0) -> Profile:
    """Return the machine of a row, with the rate of its attention kernel.

    Memory has no limit unless weights are streamed. A bandwidth above 0 is that of every link within the machine.
    """
    machine = on_links(row.card, row.links) if row.links else profile(row.card)
    attention = machine.device.attention
    if "sage" in row.attention:
        attention *= SAGE
    if "flash 2" in row.attention:
        attention = FLASH2.get(row.card, attention)
    memory = machine.device.memory if row.weights == "streamed" else 1e15
    device = replace(machine.device, attention=attention, memory=memory)
    levels = machine.levels
    if bandwidth:
        levels = tuple(replace(level, bandwidth=bandwidth) if level.size <= 8 else level for level in levels)
    return replace(machine, device=device, levels=levels, compiled=row.compiled, compares_compiled=False)


def predicted(row: Row, bandwidth: float = 0.0) -> float:
    """Return the predicted seconds of a row with our kernels, over the same part of the run that its source timed."""
    known, machine = known_model(row.model), machine_of(row, bandwidth)
    shape, tokens = known.shape, known.shape.image_tokens(*row.size)
    job = DenoiseJob(tokens, shape.text, row.batch, row.cfg, row.steps)
    degrees = mesh_degrees(
        **{axis: int(degree) for axis, degree in (part.split() for part in row.plan.split(" x ") if part)}
    )
    plan = ParallelPlan(**degrees, weights=row.weights, exchange=row.exchange)
    plans = candidates(plan, row.gpus, shape.limits, Workload(row.batch, row.cfg, shape.rows(row.size[1], row.size[2])))
    (best,) = rank(plans, shape, with_weights(job, row.dtype, machine.device), machine)
    return best.seconds * (1 if row.counts == "step" else row.steps) + beside(row, machine.device)


def beside(row: Row, device: Device) -> float:
    """Return the assumed seconds of text encoder and VAE, if the source timed them."""
    if row.counts != "all":
        return 0.0
    reference = profile("h100").device.matmul_rate("") / device.matmul_rate("")
    width, height, frames = row.size
    seconds = (second for name, second in BESIDE.items() if row.model.startswith(name))
    return reference * next(seconds, PICTURE) * width * height * frames / 1e6


@dataclass(frozen=True)
class Compared:
    """A row beside its prediction.

    Attributes:
        seconds: the predicted seconds. On several GPUs, another stack's are scaled by its one-GPU row.
        gain: the published and the predicted speed-up over one GPU; None on one GPU, or without a one-GPU row.
    """

    row: Row
    seconds: float
    gain: tuple[float, float] | None

    @property
    def error(self) -> float | None:
        """Return the relative error of the seconds; None on one GPU of another stack, whose row gives the factor."""
        if self.gain is None and self.row.stack != OURS:
            return None
        return self.seconds / self.row.seconds - 1

    @property
    def gain_error(self) -> float | None:
        """Return the relative error of the speed-up."""
        return None if self.gain is None else self.gain[1] / self.gain[0] - 1


@functools.cache
def compared() -> tuple[Compared, ...]:
    """Return all rows beside their predictions."""
    return tuple(compare(published().rows))


def compare(rows: Iterable[Row], bandwidth: float = 0.0) -> Iterator[Compared]:
    """Yield rows beside their predictions. Rows on several GPUs follow the one-GPU row of their series."""
    found = [(row, predicted(row, bandwidth)) for row in rows]
    alone = {row.series: (row.seconds, seconds) for row, seconds in reversed(found) if row.gpus == 1}
    for row, seconds in found:
        base = alone.get(row.series) if row.gpus > 1 else None
        if base is None:
            yield Compared(row, seconds, None)
            continue
        factor = 1.0 if row.stack == OURS else base[0] / base[1]
        yield Compared(row, factor * seconds, (base[0] / row.seconds, base[1] / seconds))


def errors(fitted: bool, gains: bool) -> list[float]:
    """Return the relative errors of rows that were fitted, or of all others: of their speed-ups, or of their seconds."""
    found = (entry.gain_error if gains else entry.error for entry in compared() if entry.row.fitted == fitted)
    return [error for error in found if error is not None]


def median(values: Iterable[float]) -> float:
    """Return the median of absolute errors."""
    return statistics.median(map(abs, values))


def within(values: Iterable[float], share: float) -> float:
    """Return the absolute error that a share of the values stay within."""
    ordered = sorted(map(abs, values))
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def spread(kind: str) -> float:
    """Return the error that 80 % of ComfyUI's rows with one kind of weights stay within. No constant was fitted on them."""
    rows = [entry for entry in compared() if entry.row.stack == OURS and kind_of(entry.row.dtype) == kind]
    return within((entry.error for entry in rows if entry.error is not None and not entry.row.fitted), 0.8)


def fit() -> Iterator[tuple[str, float]]:
    """Yield each fitted constant by name, with the value that its rows give.

    Compiled blocks of all stacks have about the same kernels, so one-GPU rows of compiled blocks give the shares. A bandwidth is
    the one with the least median error of speed-ups.
    """
    alone = [row for row in published().rows if row.gpus == 1 and row.compiled]
    for cards in (LIMITED, ("l40",)):
        shares = [machine_of(row).device.reached * predicted(row) / row.seconds for row in alone if row.card in cards]
        yield f"reached, {', '.join(cards)}", statistics.median(shares)
    rows = [row for row in published().rows if row.card == "l40"]
    found = {bandwidth: gain_error(rows, 1e9 * bandwidth) for bandwidth in range(8, 33, 2)}
    yield "GB/s of PCIe 4, l40", min(found, key=lambda bandwidth: found[bandwidth])


def gain_error(rows: Sequence[Row], bandwidth: float) -> float:
    """Return the median error of the rows' speed-ups with links of a bandwidth."""
    return median(entry.gain_error for entry in compare(rows, bandwidth) if entry.gain_error is not None)


def page() -> str:
    """Return the page's text."""
    return "\n".join(_lines())


HEAD = (
    "job",
    "who",
    "GPUs",
    "plan",
    "published (s)",
    "predicted",
    "error",
    "speed-up published",
    "predicted",
    "error",
    "",
)


def _lines() -> Iterator[str]:
    data = published()
    yield "# The cost model against published measurements"
    yield ""
    yield "Written by `python -m benchmarks.predictions` from `benchmarks/published.json`, which has each row's source and date."
    yield ""
    yield "## How good predictions are"
    yield ""
    heads = (
        "",
        "rows",
        "median error of seconds",
        "80 % are within",
        "rows",
        "median error of speed-ups",
        "80 % are within",
    )
    table = []
    for title, fitted in (("rows on which no constant was fitted", False), ("all other rows", True)):
        seconds, gains = errors(fitted, gains=False), errors(fitted, gains=True)
        parts = [(str(len(each)), _percent(median(each)), _percent(within(each, 0.8))) for each in (seconds, gains)]
        table.append((title, *itertools.chain(*parts)))
    yield markdown.table(heads, table)
    yield "Of the rows on which nothing was fitted, by card; seconds of another stack follow from its row on one GPU:"
    yield ""
    yield markdown.table(("card", "rows", "median error of seconds", "of speed-ups"), _by_card())
    yield NOTES
    yield "## All rows"
    yield ""
    yield TABLE_NOTES
    for card in dict.fromkeys(row.card for row in data.rows):
        yield f"### {card}" + (" (fitted)" if card in FITTED else "")
        yield ""
        yield markdown.table(HEAD, map(_cells, (entry for entry in compared() if entry.row.card == card)))
    yield "## Left out"
    yield ""
    yield markdown.table(
        ("rows", "stack", "reason", "source"),
        ((str(out.rows), out.stack, out.reason, out.source) for out in data.left_out),
    )


def _by_card() -> Iterator[Sequence[str]]:
    for card in dict.fromkeys(row.card for row in published().rows):
        found = [entry for entry in compared() if entry.row.card == card and not entry.row.fitted]
        seconds = [entry.error for entry in found if entry.error is not None]
        gains = [entry.gain_error for entry in found if entry.gain_error is not None]
        if seconds or gains:
            yield card, str(len(seconds)), *(_percent(median(each)) if each else "" for each in (seconds, gains))


def _cells(entry: Compared) -> Sequence[str]:
    row = entry.row
    seconds = _seconds(entry.seconds), _signed(entry.error)
    gains = ("", "") if entry.gain is None else tuple(f"{gain:.2f}" for gain in entry.gain)
    return (
        row.job,
        row.stack,
        str(row.gpus),
        row.plan,
        _seconds(row.seconds),
        *seconds,
        *gains,
        _signed(entry.gain_error),
        row.why,
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g}" if seconds < 1000 else f"{seconds:.0f}"


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def _signed(value: float | None) -> str:
    return "" if value is None else f"{100 * value:+.0f} %"


def main() -> None:
    """Write the page, or print the fit."""
    line = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    line.add_argument("--fit", action="store_true", help="print the fitted constants instead")
    if line.parse_args().fit:
        for name, value in fit():
            print(f"{name}: {value:.3g}")
        for kind in ERRORS:
            print(f"error that 80 % stay within, {kind}: {spread(kind):.2f}")
        return
    PAGE.write_text(page(), encoding="utf-8")
    print("\n".join(page().splitlines()[:40]))


if __name__ == "__main__":
    main()
