"""The recording of a sampler function's run, entry by entry."""

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
"""Largest number of entries: a constant and a part per sigma. ComfyUI's own functions make up to 40 entries per sigma."""

SECONDS = 10.0
SECONDS_FOR_A_SIGMA = 0.5
"""Longest time for recording: a constant and a part per sigma. ComfyUI's own functions take 2 ms per sigma."""


class NotRecordable(BaseException):
    """A refusal, because a sampler does more than elementwise operations. `clause` gives the reason, after the word "which".

    This class is not an Exception, because a function may catch any Exception and continue forever.
    """

    def __init__(self, clause: str) -> None:
        super().__init__(clause)
        self.clause = clause


@dataclass
class Cell:
    """The present value of a recorded latent. Latents that share memory in a plain run share a cell.

    Attributes:
        value: the number of the program's value.
        spoilt: the reason why the value must not be used: it might differ from the value in a plain run.
        drawn: the index of the entry that drew the value, for fresh noise.
        count: the number of latents that are stacked along `dim`; 0 for a single latent.
        dim: the dimension of the stack.
    """

    value: int
    spoilt: str = ""
    drawn: int | None = None
    count: int = 0
    dim: int = 0


class TapeRules(Protocol):
    """The rules that record torch's operations on recorded latents."""

    def before(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of a torch function that is recorded as one operation; None for all other functions."""

    def done(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Record one of the operations that torch's functions consist of, and return its result."""


@dataclass
class Tape:
    """The entries of a program while it is recorded.

    Args:
        shape, dtype: the latent's.
        sigmas: the number of sigmas.
        rules: the rules that record operations.
    """

    shape: torch.Size
    dtype: torch.dtype
    sigmas: int
    rules: TapeRules
    entries: list[Operation | Draw | ModelEvaluation | StepEvent] = field(default_factory=list)
    weights: list[Weights] = field(default_factory=list)
    sources: list[NoiseSource] = field(default_factory=list)
    refused: NotRecordable | None = None
    """The first refusal, which the function may have caught."""
    dtypes: dict[object, torch.dtype] = field(default_factory=dict)
    """Dtypes of results, by the operation and its operands' dtypes."""

    def __post_init__(self) -> None:
        self._values = 1
        self._used: set[int] = set()
        self._seconds = SECONDS + SECONDS_FOR_A_SIGMA * self.sigmas
        self._ends = time.monotonic() + self._seconds

    def refuse(self, clause: str) -> NotRecordable:
        """Store the first refusal permanently, and return it."""
        self.refused = self.refused or NotRecordable(clause)
        return self.refused

    def look(self) -> None:
        """Raise NotRecordable if the function has been refused already, or takes too long."""
        if self.refused is not None:
            raise self.refused
        if time.monotonic() > self._ends:
            raise self.refuse(f"runs for more than {self._seconds:g} s on a latent without data")

    def operation(self, name: str, arguments: Sequence[Argument], keywords: dict[str, Argument] | None = None) -> int:
        """Record an operation and return the number of its result."""
        keywords = keywords or {}
        self._used |= {argument.value for argument in (*arguments, *keywords.values()) if isinstance(argument, Ref)}
        return self._write(Operation(name, tuple(arguments), keywords), 1)

    def call(self, x: int, sigma: float, both_branches: bool) -> int:
        """Record a model call and return the number of its first value.

        The first value is the denoised latent. With `both_branches`, the positive and the negative prediction follow.
        """
        self._used.add(x)
        return self._write(ModelEvaluation(x, sigma, both_branches), 3 if both_branches else 1)

    def show(self, step: int, x: int, denoised: int) -> None:
        """Record a step that the function reports, with the numbers of its latents."""
        self._used |= {x, denoised}
        self._write(StepEvent(step, x, denoised), 0)

    def draw(self, source: int, start: float, end: float) -> Cell:
        """Record a draw of fresh noise for the step between two sigmas, from the source of this number."""
        if not any(isinstance(entry, ModelEvaluation) for entry in self.entries):
            raise self.refuse("draws noise before it calls the model")
        value = self._write(Draw(source, start, end), 1)
        return Cell(value, drawn=len(self.entries) - 1)

    def clip(self, noise: Cell, deviations: float) -> Cell:
        """Clamp fresh noise to a number of its own standard deviations, in the entry that drew it."""
        assert noise.drawn is not None
        if noise.value in self._used:
            raise self.refuse("uses noise before it clamps it")
        draw = self.entries[noise.drawn]
        assert isinstance(draw, Draw)
        self.entries[noise.drawn] = msgspec.structs.replace(draw, clip=deviations)
        noise.spoilt = "uses noise both before and after it clamps it"
        return Cell(noise.value)

    def weigh(self, numbers: Sequence[float], dtype: torch.dtype) -> int:
        """Return the number of a vector of weights, and store it if it is new."""
        weights = Weights(tuple(numbers), str(dtype).removeprefix("torch."))
        if weights not in self.weights:
            self.weights.append(weights)
        return self.weights.index(weights)

    def cast(self, value: int, dtype: torch.dtype, target: torch.dtype) -> int:
        """Record a conversion to another dtype, and return the number of the converted value."""
        return value if dtype == target else self.operation("to", (Ref(value), str(target).removeprefix("torch.")))

    def program(self, name: str, result: int) -> Program:
        """Return the recorded program.

        Args:
            name: the function's name.
            result: the number of the value that the function returns.
        """
        return Program(name, tuple(self.entries), result, tuple(self.weights), tuple(self.sources))

    def _write(self, entry: Operation | Draw | ModelEvaluation | StepEvent, values: int) -> int:
        self.look()
        if len(self.entries) >= ENTRIES + ENTRIES_FOR_A_SIGMA * self.sigmas:
            raise self.refuse(f"uses more than {len(self.entries)} operations on the latent")
        self.entries.append(entry)
        first = self._values
        self._values += values
        return first
