"""Compares published times with predictions: the parts of a predicted time, and the least time by the cards' data sheets.

    python -m benchmarks.published_rows

Prints the table of docs/measured/published-rows.md. The script measures nothing. Each row is the fastest exact plan with
replicated weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from parallel_backend.plan import ParallelPlan, Workload, candidates
from parallel_backend.plan.choose import rank
from parallel_backend.plan.plan import COMPILER
from parallel_backend.plan.predict.cost import DenoiseJob, cost
from parallel_backend.plan.predict.known_machines import profile, software
from parallel_backend.plan.predict.known_models import known_model
from parallel_backend.plan.predict.profiles import Profile

PEAKS = {"h100": 989, "h200": 989, "b200": 2250, "l20": 119.5, "4090": 165, "pro-5000": 258}
"""TFLOP/s by a card's data sheet: dense bf16 with fp32 sums."""

D = 0.89
"""Cores of an RTX 4090 D relative to an RTX 4090."""

PARTS = ("matmul", "attention", "other kernels", "exchange", "host")


@dataclass(frozen=True)
class Row:
    """A published time in seconds, for `steps` of a job on cards; `by` names who published it.

    `slower` is the fraction of the card's rates that these cards reach. `has_uncond` is true if there is a negative prompt.
    """

    model: str
    size: tuple[int, int, int]
    card: str
    gpus: int
    published: str
    by: str
    steps: int = 1
    has_uncond: bool = False
    compiled: bool = False
    exchange: str = "exact"
    slower: float = 1.0

    @property
    def what(self) -> str:
        """Return the job as text."""
        width, height, frames = self.size
        area = f"{width}x{height}" + (f"x{frames}" if frames > 1 else "")
        how = ", ".join(
            word
            for word, said in (
                ("cfg", self.has_uncond),
                ("compiled", self.compiled),
                ("exchange fp8", self.exchange == "fp8"),
            )
            if said
        )
        return f"{self.model} {area}, {self.steps} step{'s' * (self.steps > 1)}{', ' * bool(how)}{how}"


VIDEO = (832, 480, 81)
LARGE = (1280, 720, 81)
PICTURE = (1024, 1024, 1)
FIVE_SECONDS = (1344, 768, 121)

ROWS: Sequence[Row] = (
    Row("wan2.1-14b", VIDEO, "h100", 1, "5.18; 6.13", "LightX2V; SGLang", has_uncond=True),
    Row("wan2.1-14b", VIDEO, "h100", 8, "0.75; 1.19", "LightX2V; SGLang", has_uncond=True),
    Row("wan2.1-14b", VIDEO, "4090", 8, "3.13", "LightX2V", slower=D),
    Row("wan2.1-14b", VIDEO, "4090", 8, "2.35", "LightX2V", slower=D, exchange="fp8"),
    Row("flux-dev", PICTURE, "l20", 2, "12.21", "cache-dit", steps=28, compiled=True),
    Row("flux-dev", PICTURE, "l20", 2, "11.54", "cache-dit", steps=28, compiled=True, exchange="fp8"),
    Row("qwen-image", PICTURE, "h100", 2, "12.81", "cache-dit", steps=50),
    Row("wan2.2-14b", LARGE, "h100", 4, "206", "SGLang", steps=40, has_uncond=True),
    Row("wan2.2-14b", LARGE, "b200", 4, "105", "SGLang", steps=40, has_uncond=True),
    Row("minimax-h3", FIVE_SECONDS, "h200", 4, "1.46", "a node pack"),
    Row("minimax-h3", FIVE_SECONDS, "pro-5000", 8, "3.25", "a node pack"),
    Row("minimax-h3", FIVE_SECONDS, "pro-5000", 4, "5.69", "a node pack"),
    Row("minimax-h3", FIVE_SECONDS, "pro-5000", 2, "10.3", "a node pack"),
)
"""The published rows. 4090 D cards are 4090s with fewer cores.

The size of MiniMax-H3's five seconds is not published: we assume the usual one.
"""


def predicted(row: Row) -> tuple[str, float, float, dict[str, float]]:
    """Return the plan, its seconds, its seconds with compiled blocks, and the parts of the first seconds."""
    known, machine = known_model(row.model).shape, profile(row.card)
    job = DenoiseJob(known.image_tokens(*row.size), known.text, has_uncond=row.has_uncond, steps=row.steps)
    device = replace(
        machine.device,
        matmul=machine.device.matmul * row.slower,
        attention=machine.device.attention * row.slower,
        memory=1e15,
    )
    eager = replace(machine, device=device)
    compiled = replace(eager, software=software(COMPILER), compiled=None)
    requested_plan = ParallelPlan(data=0, exchange=row.exchange)
    plans = candidates(requested_plan, row.gpus, known.limits, Workload(1, row.has_uncond, 1 << 20))
    taken = compiled if row.compiled else eager
    best = rank(plans, known, job, taken)[0]

    def device_seconds(machine: Profile) -> float:
        return cost(best.plan, known, job, machine).device

    whole, infinite = best.breakdown.device, 1e30
    parts = {
        "matmul": whole - device_seconds(replace(taken, device=replace(device, matmul=infinite))),
        "attention": whole - device_seconds(replace(taken, device=replace(device, attention=infinite))),
        "other kernels": whole - device_seconds(replace(taken, device=replace(device, bandwidth=infinite))),
        "exchange": best.breakdown.ulysses + best.breakdown.ring + best.breakdown.cfg,
        "host": best.breakdown.launch,
    }
    with_compiler = rank(plans, known, job, compiled)[0].seconds
    steps = row.steps
    return (
        best.plan.degrees,
        best.seconds * steps,
        with_compiler * steps,
        {name: parts[name] * steps for name in PARTS},
    )


def least(row: Row) -> float:
    """Return the seconds of matmuls and attention alone, at the data sheet's rate, evenly on all cards."""
    known = known_model(row.model).shape
    image = known.image_tokens(*row.size)
    tokens = image + (known.text if known.joint_text else 0)
    scores = 4 * tokens * (tokens if known.joint_text else image + known.text) * known.hidden
    flops = known.blocks * (2 * tokens * known.token_weights + scores) * (2 if row.has_uncond else 1)
    return row.steps * flops / (PEAKS[row.card] * 1e12 * row.slower * row.gpus)


def lines() -> list[str]:
    """Return the lines of the table."""
    heads = ("job", "cards", "published (s)", "predicted", "plan", *PARTS, "compiled", "least")
    found = [f"| {' | '.join(heads)} |", f"|{' --- |' * 3}{' ---: |'} --- |{' ---: |' * (len(PARTS) + 2)}"]
    for row in ROWS:
        plan, seconds, compiled, parts = predicted(row)
        card = f"{row.gpus} {row.card.upper()}{' D' if row.slower < 1 else ''}"
        numbers = [_said(parts[name]) for name in PARTS] + [_said(compiled), _said(least(row))]
        cells = (row.what, card, f"{row.published} ({row.by})", _said(seconds), plan, *numbers)
        found.append(f"| {' | '.join(cells)} |")
    return found


def _said(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds < 10 else f"{seconds:.1f}" if seconds < 100 else f"{seconds:.0f}"


if __name__ == "__main__":
    print("\n".join(lines()))
