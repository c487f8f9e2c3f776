"""What has been recorded so far of a sampler function's run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import torch

from ....parallel_backend.denoise.program import (
    Argument,
    Draw,
    ModelEvaluation,
    NoiseSource,
    Operation,
    Program,
    Ref,
    StepEvent,
    Weights,
)

ENTRIES = 2000
ENTRIES_FOR_A_SIGMA = 1000
"""How much a function may do: ComfyUI's own do up to 40 things for each sigma."""

SECONDS = 10.0
SECONDS_FOR_A_SIGMA = 0.5
"""How long it may take: ComfyUI's own take 2 ms for each sigma."""


class NotRecordable(BaseException):
    """A sampler does what cannot be done to each element of a latent for itself; `clause` says what, behind "which".

    No Exception, which a function may catch and go on for ever.
    """

    def __init__(self, clause: str) -> None:
        super().__init__(clause)
        self.clause = clause


@dataclass
class Cell:
    """What a recorded latent is at this moment; shared by those that are one memory in a plain run.

    `spoilt` says why it must not be used: it is not known to be what it would be in a plain run. `drawn` is the place of the
    entry that drew it, for fresh noise. Where `count` is not 0 it is so many latents, stacked along `dim`.
    """

    value: int
    spoilt: str = ""
    drawn: int | None = None
    count: int = 0
    dim: int = 0


class TapeRules(Protocol):
    """What becomes of torch's operations on recorded latents."""

    def before(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a function of torch's makes, where it is not to be looked into; None otherwise."""

    def done(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What one of the operations makes that torch's functions consist of."""


@dataclass
class Tape:
    """The entries of a program, as they are written.

    Args:
        shape, dtype: the latent's.
        sigmas: how many there are.
    """

    shape: torch.Size
    dtype: torch.dtype
    sigmas: int
    rules: TapeRules
    entries: list[Operation | Draw | ModelEvaluation | StepEvent] = field(default_factory=list)
    weights: list[Weights] = field(default_factory=list)
    sources: list[NoiseSource] = field(default_factory=list)
    refused: NotRecordable | None = None
    """The first thing that was refused, which a function may have caught."""
    dtypes: dict[object, torch.dtype] = field(default_factory=dict)
    """Of results, by what they are made of."""

    def __post_init__(self) -> None:
        self._values = 1
        self._used: set[int] = set()
        self._ends = time.monotonic() + SECONDS + SECONDS_FOR_A_SIGMA * self.sigmas

    def refuse(self, clause: str) -> NotRecordable:
        """Store a refusal, permanently, and return it."""
        self.refused = self.refused or NotRecordable(clause)
        return self.refused

    def look(self) -> None:
        """Raise NotRecordable if the function should have been stopped already, or takes too long."""
        if self.refused is not None:
            raise self.refused
        if time.monotonic() > self._ends:
            raise self.refuse("takes too long on a latent without data")

    def operation(self, name: str, arguments: Sequence[Argument], keywords: dict[str, Argument] | None = None) -> int:
        """Record an operation and return the number of the value that the operation makes."""
        keywords = keywords or {}
        self._used |= {argument.value for argument in (*arguments, *keywords.values()) if isinstance(argument, Ref)}
        return self._write(Operation(name, tuple(arguments), keywords), 1)

    def call(self, x: int, sigma: float, both_branches: bool) -> int:
        """Record a model call. Return the number of its first value: denoised, and with `both_branches` the positive and the
        negative.
        """
        self._used.add(x)
        return self._write(ModelEvaluation(x, sigma, both_branches), 3 if both_branches else 1)

    def show(self, step: int, x: int, denoised: int) -> None:
        """What the function tells of a step."""
        self._used |= {x, denoised}
        self._write(StepEvent(step, x, denoised), 0)

    def draw(self, source: int, start: float, end: float) -> Cell:
        """Fresh noise for the step from one sigma to another, from a source by its number."""
        if not any(isinstance(entry, ModelEvaluation) for entry in self.entries):
            raise self.refuse("draws noise before it calls the model")
        value = self._write(Draw(source, start, end), 1)
        return Cell(value, drawn=len(self.entries) - 1)

    def clip(self, noise: Cell, deviations: float) -> Cell:
        """Fresh noise, clamped to so many of its own standard deviations, in the place of what was drawn."""
        assert noise.drawn is not None
        if noise.value in self._used:
            raise self.refuse("uses noise before it clamps it")
        draw = self.entries[noise.drawn]
        assert isinstance(draw, Draw)
        self.entries[noise.drawn] = msgspec.structs.replace(draw, clip=deviations)
        noise.spoilt = "uses noise before and behind clamping it"
        return Cell(noise.value)

    def weigh(self, numbers: Sequence[float], dtype: torch.dtype) -> int:
        """The number of a vector of weights."""
        weights = Weights(tuple(numbers), str(dtype).removeprefix("torch."))
        if weights not in self.weights:
            self.weights.append(weights)
        return self.weights.index(weights)

    def cast(self, value: int, dtype: torch.dtype, target: torch.dtype) -> int:
        """Return a value converted to another dtype."""
        return value if dtype == target else self.operation("to", (Ref(value), str(target).removeprefix("torch.")))

    def program(self, name: str, result: int) -> Program:
        """What has been recorded, of a function by its name; `result` is the value that it returns."""
        return Program(name, tuple(self.entries), result, tuple(self.weights), tuple(self.sources))

    def _write(self, entry: Operation | Draw | ModelEvaluation | StepEvent, values: int) -> int:
        self.look()
        if len(self.entries) >= ENTRIES + ENTRIES_FOR_A_SIGMA * self.sigmas:
            raise self.refuse(f"does more than {len(self.entries)} things to the latent")
        self.entries.append(entry)
        first = self._values
        self._values += values
        return first
