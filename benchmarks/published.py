"""The published times of published.json, and those that were left out."""

from __future__ import annotations

import functools
from pathlib import Path

import msgspec

DATA = Path(__file__).with_name("published.json")

LIMITED = ("a100", "b200", "h100")
"""Cards whose long runs are slowed by their power limit. `CardProfile.reached` is fitted on their rows."""

FITTED = (*LIMITED, "l40")
"""Cards on whose rows constants were fitted."""


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
        links: the links between the GPUs in the source's words; empty if it does not say. A card's usual links are assumed.
        presumed: what the source does not say and this row assumes.
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
    presumed: str = ""
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
