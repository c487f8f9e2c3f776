"""The replay of a sampler's program on a latent or on one patch of it. The host never waits for the device.

steps = script.replay(x, noise, on_step)
call = next(steps)
while True:
    call = steps.send(model(call.x, call.sigma))        # StopIteration.value is the final latent
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import Refused
from ..transfers import to_device
from .noise import Drawn, LatentNoise, check_step
from .program import (
    ELEMENTWISE,
    CallInfo,
    Draw,
    ModelEvaluation,
    Operation,
    Program,
    Ref,
    StackWeights,
    StepEvent,
    function_of,
    view_along,
)
from .well_formed import decoded


class ModelRequest(NamedTuple):
    """A request of a sampler for one evaluation of the model."""

    x: Tensor
    """Noisy latent, fp32 `[batch, channels, ...]`."""
    sigma: Tensor
    """Noise level of the whole batch `x`, 0-dim fp32 on the CPU."""


class Prediction(NamedTuple):
    """The clean latent that one model call predicts, fp32 `[batch, channels, ...]`."""

    denoised: Tensor
    """The prediction after guidance and, when inpainting, after the mask."""
    branches: Sequence[Tensor]
    """The positive branch, and the negative if there is one; empty if LazyCache answered the call."""


Steps = Generator[ModelRequest, Prediction, Tensor]
"""A running sampler: a generator that yields model requests, receives predictions and returns the final latent."""

OnStep = Callable[[int, Tensor, Tensor], None]
"""A function of (step, denoised latent, x) that is called at each step event."""


@dataclass(frozen=True, slots=True)
class _Computed:
    """An operation that is ready to run.

    `positions` has the position and the value's number of each argument that is a value, `named` the same for keywords.
    """

    function: Callable[..., Tensor]
    arguments: list[Any]
    positions: list[tuple[int, int]]
    keywords: dict[str, Any]
    named: list[tuple[str, int]]

    def of(self, values: dict[int, Tensor]) -> Tensor:
        arguments, keywords = self.arguments, self.keywords
        if self.positions:
            arguments = arguments.copy()
            for position, number in self.positions:
                arguments[position] = values[number]
        if self.named:
            keywords = keywords | {name: values[number] for name, number in self.named}
        return self.function(*arguments, **keywords)


@dataclass(frozen=True, slots=True)
class _PendingCall:
    """A model evaluation that is ready to run: its sigma is a tensor."""

    x: int
    sigma: Tensor
    has_branches: bool


_Entry = _Computed | _PendingCall | Draw | StepEvent


@dataclass(frozen=True, slots=True)
class _Step:
    """An entry, the number of the first value that it makes, and the values that no later entry uses."""

    entry: _Entry
    makes: int
    last_used: tuple[int, ...]


class DeviceProgram:
    """A program that was prepared for a device before its run.

    Args:
        program: the program.
        ndim: the number of a latent's dimensions.
        device: the device of the latents.
    """

    def __init__(self, program: Program, ndim: int, device: torch.device) -> None:
        self.program = program
        self._weights = {}
        for along in _all_along(program):
            self._weights[along] = to_device(view_along(program.weights[along.weights], along, ndim), device)
        self._steps = self._prepared(program)

    def calls(self) -> list[CallInfo]:
        """Return all model calls."""
        return self.program.calls()

    def replay(self, x: Tensor, noise: LatentNoise, on_step: OnStep = lambda *_: None) -> Steps:
        """Start the program on the noisy latent `x`, fp32: the whole latent or a patch.

        The program never writes to tensors that are yielded or sent.
        """
        sources = [noise.drawn_from(source) for source in self.program.sources]
        return self._replay(x, sources, on_step)

    def _replay(self, x: Tensor, sources: Sequence[Drawn], on_step: OnStep) -> Steps:
        values = {0: x}
        branches: Sequence[Tensor] = ()
        for step in self._steps:
            entry, number = step.entry, step.makes
            if isinstance(entry, _Computed):
                values[number] = entry.of(values)
            elif isinstance(entry, _PendingCall):
                answer = yield ModelRequest(values[entry.x], entry.sigma)
                values[number] = answer.denoised
                if entry.has_branches:
                    branches = answer.branches or branches
                    positive, negative = branches if len(branches) > 1 else (branches[0], torch.zeros_like(branches[0]))
                    values[number + 1], values[number + 2] = positive, negative
            elif isinstance(entry, Draw):
                values[number] = sources[entry.source](entry.start, entry.end, entry.clip)
            else:
                on_step(entry.step, values[entry.denoised], values[entry.x])
            for dead in step.last_used:
                del values[dead]
        return values[self.program.result]

    def _prepared(self, program: Program) -> list[_Step]:
        entries: list[tuple[_Entry, int]] = []
        count, last_use = 1, {0: -1}
        for position, entry in enumerate(program.entries):
            for value in _used(entry):
                last_use[value] = position
            value_count = _value_count(entry)
            last_use |= dict.fromkeys(range(count, count + value_count), position)
            entries.append((self._ready(entry), count))
            count += value_count
        dying: list[list[int]] = [[] for _ in entries]
        for value, position in last_use.items():
            if value != program.result and position >= 0:
                dying[position].append(value)
        return [_Step(entry, makes, tuple(dead)) for (entry, makes), dead in zip(entries, dying, strict=True)]

    def _ready(self, entry: Operation | Draw | ModelEvaluation | StepEvent) -> _Entry:
        if isinstance(entry, ModelEvaluation):
            return _PendingCall(entry.x, torch.tensor(entry.sigma), entry.sides)
        return self._computed(entry) if isinstance(entry, Operation) else entry

    def _computed(self, entry: Operation) -> _Computed:
        wants = ELEMENTWISE.get(entry.name, 0)
        arguments: list[Any] = []
        for position, argument in enumerate(entry.arguments):
            number = isinstance(argument, bool | int | float)
            tensor = (
                torch.tensor(argument, dtype=torch.float64 if isinstance(argument, float) else None) if number else None
            )
            arguments.append(tensor if position < wants and number else self._value(argument))
        return _Computed(
            function=function_of(entry.name),
            arguments=arguments,
            positions=[(position, arg.value) for position, arg in enumerate(entry.arguments) if isinstance(arg, Ref)],
            keywords={name: self._value(argument) for name, argument in entry.keywords.items()},
            named=[(name, argument.value) for name, argument in entry.keywords.items() if isinstance(argument, Ref)],
        )

    def _value(self, argument: Any) -> Any:
        return self._weights[argument] if isinstance(argument, StackWeights) else argument


def script_of(data: Tensor, ndim: int, sigmas: int, device: torch.device) -> DeviceProgram:
    """Decode and prepare the program of a request, after a trial on latents of one element.

    Args:
        data: the bytes that `program.encoded` returned.
        ndim: the number of the latent's dimensions.
        sigmas: the number of the request's sigmas.
        device: the device of the latents.

    Raises:
        Refused: the program is not well-formed, fails in the trial, or needs noise that cannot be drawn.
    """
    program = decoded(data, ndim, sigmas)
    for entry in program.entries:
        if isinstance(entry, Draw):
            check_step(program.sources[entry.source], entry.start, entry.end)
    try:
        _try(program, torch.zeros((1,) * ndim))
    except (RuntimeError, TypeError, ValueError, IndexError, OverflowError) as error:
        reason = str(error).partition("\n")[0]
        raise Refused(
            f"the program of the sampler {program.name} cannot be run ({reason}): use the same version of this pack on all "
            "machines, or another sampler."
        ) from None
    return DeviceProgram(program, ndim, device)


def _try(program: Program, x: Tensor) -> None:
    noise = LatentNoise(tuple(x.shape), x.device, lambda _draw: x)
    steps = DeviceProgram(program, x.ndim, x.device).replay(
        x, noise, lambda _step, *latents: _check_latents(x, *latents)
    )
    answer: Prediction | None = None
    while True:
        try:
            call = next(steps) if answer is None else steps.send(answer)
        except StopIteration as end:
            result = end.value
            break
        _check_latents(x, call.x)
        answer = Prediction(x, (x, x))
    _check_latents(x, result)


def _check_latents(like: Tensor, *latents: Tensor) -> None:
    for latent in latents:
        if latent.shape != like.shape or latent.dtype != like.dtype:
            raise ValueError(
                f"a latent has the shape {list(latent.shape)} and the dtype {latent.dtype}, instead of {list(like.shape)} and "
                f"{like.dtype}"
            )


def _value_count(entry: Operation | Draw | ModelEvaluation | StepEvent) -> int:
    """Return the number of values that an entry makes."""
    if isinstance(entry, ModelEvaluation):
        return 3 if entry.sides else 1
    return 0 if isinstance(entry, StepEvent) else 1


def _used(entry: Operation | Draw | ModelEvaluation | StepEvent) -> list[int]:
    """Return the numbers of the values that an entry needs."""
    match entry:
        case Operation():
            return [each.value for each in (*entry.arguments, *entry.keywords.values()) if isinstance(each, Ref)]
        case ModelEvaluation():
            return [entry.x]
        case StepEvent():
            return [entry.x, entry.denoised]
    return []


def _all_along(program: Program) -> set[StackWeights]:
    operations = [entry for entry in program.entries if isinstance(entry, Operation)]
    arguments = [each for entry in operations for each in (*entry.arguments, *entry.keywords.values())]
    return {each for each in arguments if isinstance(each, StackWeights)}
