"""Comparison of numbers of GPUs and of ways to hold a model's weights, by predicted seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import NamedTuple

from .choose import is_approximate, rank
from .plan import EXCHANGES, WEIGHTS, ParallelPlan, ResolvedPlan, Workload
from .predict.certainty import likely
from .predict.profiles import DenoiseJob, Device, ModelShape, Profile, expansion_of
from .resolve import candidates

WEIGHT_BYTES = {
    "bf16": 2.0,
    "fp8": 1.0,
    "fp8_fast": 1.0,
    "int8": 1.0,
    "nvfp4": 9 / 16,
    "q8_0": 34 / 32,
    "q4_k": 144 / 256,
}
"""Bytes of one weight by dtype: bf16, fp8 that is expanded to bf16, three quantised dtypes that cards multiply, and two of
GGUF's types.
"""

WHOLE = ("bf16", "fp8", "fp8_fast", "int8")
"""Dtypes that store each value separately, not in blocks."""


PIPEFUSION = "PipeFusion"
ONE_GPU = "one GPU"


def with_weights(job: DenoiseJob, dtype: str, device: Device) -> DenoiseJob:
    """Return the job with weights of a dtype.

    A device that cannot multiply weights of this dtype expands them to the compute dtype.
    """
    stored = WEIGHT_BYTES[dtype]
    if dtype in device.quantised:
        return replace(job, weight_element=stored, expansion=0.0, multiplied=dtype)
    expansion = expansion_of(stored, job.element, dtype not in WHOLE) if stored < job.element else 0.0
    return replace(job, weight_element=stored, expansion=expansion, multiplied="")


@dataclass(frozen=True)
class OfferRequest:
    """A job on a kind of machine, with the plans to compare.

    Attributes:
        model: the model's shape.
        job: the job.
        machine: the machine.
        dtype: the name of the weights' dtype, a key of WEIGHT_BYTES.
        token_rows: the picture's rows of tokens, all frames together.
        weights: the ways in which the weights may be held, of `plan.WEIGHTS`.
        patches: PipeFusion patches; 0 for as many as stages.
        approximate: also choose plans with PipeFusion, which change the picture.
        exchange: the plan's `exchange` setting.
    """

    model: ModelShape
    job: DenoiseJob
    machine: Profile
    dtype: str
    token_rows: int
    weights: tuple[str, ...]
    patches: int
    approximate: bool
    exchange: str = EXCHANGES[0]

    def plans(self, gpus: int, weights: str) -> list[ResolvedPlan]:
        """Return every plan for a number of GPUs and one way to hold the weights, including approximate plans."""
        stages = 0 if weights == "replicated" else 1
        requested_plan = ParallelPlan(
            pipefusion=stages, data=0, weights=weights, patches=self.patches, exchange=self.exchange
        )
        workload = Workload(self.job.batch, self.job.has_uncond, self.token_rows)
        return candidates(requested_plan, gpus, self.model.limits, workload)

    def as_dtype(self, dtype: str) -> OfferRequest:
        """Return the request for the same model with weights of another dtype."""
        return replace(self, dtype=dtype, job=with_weights(self.job, dtype, self.machine.device))


class Offer(NamedTuple):
    """The best plan of a way to hold the weights: its degrees, seconds a picture, bytes on a GPU, and True if it fits."""

    storage: str
    degrees: str
    seconds: float
    memory: float
    fits: bool


def offered(request: OfferRequest, gpus: int) -> list[Offer]:
    """Return the fastest plan that fits for each way to hold the weights, exact plans first.

    If no plan of a way fits, the offer is the plan that needs the least memory.
    """
    machine = replace(request.machine, compares_compiled=False)
    offers = []
    for approximate in (False, True):
        for weights in request.weights:
            plans = [plan for plan in request.plans(gpus, weights) if is_approximate(plan) == approximate]
            ranking = rank(plans, request.model, request.job, machine)
            if not ranking:
                continue
            fits = ranking[0].breakdown.fits
            best = ranking[0] if fits else min(ranking, key=lambda entry: entry.breakdown.memory)
            storage = PIPEFUSION if approximate else weights
            offers.append(
                Offer(storage, best.plan.degrees, best.seconds * request.job.steps, best.breakdown.memory, fits)
            )
    return offers


def by_count(request: OfferRequest, counts: Sequence[int]) -> str:
    """Return a table of the fastest plan on each number of GPUs, with the likely range of its seconds."""
    rows = [("GPUs", "seconds", "likely", "gain", "GB a GPU", "weights", "plan")]
    alone: float | None = None
    for gpus in counts:
        offers = [offer for offer in offered(request, gpus) if request.approximate or offer.storage != PIPEFUSION]
        fitting = [offer for offer in offers if offer.fits]
        if not fitting:
            smallest = min(offers, key=lambda offer: offer.memory)
            there = f"not enough GPU memory: each GPU has {request.machine.device.memory / 1e9:.1f} GB"
            rows.append((str(gpus), "-", "", "", f"{smallest.memory / 1e9:.1f}", smallest.storage, there))
            continue
        fastest = min(fitting, key=lambda offer: offer.seconds)
        alone = fastest.seconds if gpus == 1 else alone
        gain = f"{alone / fastest.seconds:.2f}x" if alone and gpus > 1 else ""
        rows.append(
            (
                str(gpus),
                _seconds(fastest.seconds),
                "-".join(map(_seconds, likely(fastest.seconds, request.dtype))),
                gain,
                f"{fastest.memory / 1e9:.1f}",
                fastest.storage,
                fastest.degrees if gpus > 1 else ONE_GPU,
            )
        )
    return _aligned(rows, 5)


def by_file(request: OfferRequest, counts: Sequence[int]) -> str:
    """Return a table of seconds by the dtype of the model's file and by the number of GPUs, the fastest file first.

    A last row has plans with PipeFusion.
    """
    rows = []
    for dtype in WEIGHT_BYTES:
        asked = replace(request.as_dtype(dtype), weights=WEIGHTS)
        found = [[each for each in offered(asked, gpus) if each.storage != PIPEFUSION] for gpus in counts]
        rows.append((min(map(_fastest, found)), [dtype, *map(_cell, found)]))
    asked = replace(request, weights=WEIGHTS)
    piped = [[each for each in offered(asked, gpus) if each.storage == PIPEFUSION] for gpus in counts]
    last = [f"{request.dtype}, PipeFusion: changes the picture slightly", *map(_cell, piped)]
    heads = ["file", *(f"{gpus} GPU{'s' * (gpus > 1)}" for gpus in counts)]
    return _aligned([heads, *(row for _, row in sorted(rows, key=itemgetter(0))), last], 0)


def _fastest(offers: Sequence[Offer]) -> float:
    return min((offer.seconds for offer in offers if offer.fits), default=math.inf)


def _cell(offers: Sequence[Offer]) -> str:
    """Return the fastest offer that fits as text, or else the memory that the smallest needs; a dash without offers."""
    fitting = [offer for offer in offers if offer.fits]
    if fitting:
        fastest = min(fitting, key=lambda offer: offer.seconds)
        return (
            f"{_seconds(fastest.seconds)} {fastest.storage}"
            if fastest.storage != PIPEFUSION
            else _seconds(fastest.seconds)
        )
    return f"needs {min(offer.memory for offer in offers) / 1e9:.1f} GB" if offers else "-"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < 100 else f"{seconds:.0f}"


def _aligned(rows: Sequence[Sequence[str]], numbers: int) -> str:
    """Return the rows as a text table, with the first `numbers` columns aligned to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = (
        "  ".join(
            cell.rjust(width) if column < numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
