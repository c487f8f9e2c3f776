"""Compares the cost model with published times: its errors, and the fit of its constants.

Each constant that was fitted has a physical meaning, and was fitted on the rows of FITTED cards alone.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from parallel_backend.mesh_axes import mesh_degrees
from parallel_backend.plan import ParallelPlan, Workload, candidates
from parallel_backend.plan.choose import rank
from parallel_backend.plan.offers import with_weights
from parallel_backend.plan.predict.certainty import kind_of
from parallel_backend.plan.predict.known_machines import profile
from parallel_backend.plan.predict.known_models import known_model
from parallel_backend.plan.predict.profiles import DenoiseJob, Device, Profile

from .published import LIMITED, Row, published

OURS = "ComfyUI"
"""The stack whose kernels are ours. Each other stack's one-GPU row gives a factor for its rows on several GPUs."""

SAGE = 1.9
"""The rate of SageAttention 2 as a multiple of the rate of a card's own kernel.

By its own plots it is 1.9 to 2.0 on the RTX 3090, L20, H20 and H100, and 2.6 on the RTX 4090 and 5090. The H20's and H100's own
kernel is FlashAttention 3.
"""

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


def machine_of(row: Row, bandwidth: float = 0.0) -> Profile:
    """Return the machine of a row, with the rate of its attention kernel.

    Memory has no limit unless weights are streamed. A bandwidth above 0 is that of every link within the machine.
    """
    machine = profile(row.card)
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
    """Return the error of `likely` that 80 % of ComfyUI's rows with one kind of weights stay within, rounded up to a percent.

    A prediction of half the published seconds is as far off as one of twice the seconds. No constant was fitted on the rows.
    """
    rows = [entry for entry in compared() if entry.row.stack == OURS and kind_of(entry.row.dtype) == kind]
    ratios = [entry.seconds / entry.row.seconds for entry in rows if not entry.row.fitted]
    return math.ceil(100 * within((max(ratio, 1 / ratio) - 1 for ratio in ratios), 0.8)) / 100


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
