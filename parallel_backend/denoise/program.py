"""A sampler as a program: what one of ComfyUI's functions did to the latent, in order, as data that any rank can replay.

Values are numbered as they come: 0 is the noisy latent at the first sigma, and every operation and draw makes the next one,
a model call its denoised latent and, where they are used, the two sides it was made of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from ..errors import Refused
from .operations import DTYPES, ELEMENTWISE, KEYWORDS

ENTRIES_FOR_A_SIGMA = 4096
"""How long a program may be; ComfyUI's own have some 40 entries for each sigma."""

MOST_STACKED = 256
MOST_ARGUMENTS = 8
MOST_DIMS = 8


class Ref(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag=True):
    """The value of this number."""

    value: int


class Along(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag=True):
    """A vector of the program's `weights`, one for each latent of a stack along its dimension `dim`."""

    weights: int
    dim: int


Argument = Ref | Along | bool | int | float | str | None


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag=True):
    """One thing that happens."""


class Operation(Entry, frozen=True):
    """Makes a value of others, by the name that `operations` has for it."""

    name: str
    arguments: tuple[Argument, ...]
    keywords: dict[str, Argument] = {}


class Draw(Entry, frozen=True):
    """Makes a value: fresh noise for the step from one sigma to another, from a source. It comes behind a model call, as only the
    last stage draws.

    With `clip` each draw is clamped to that many of its own standard deviations.
    """

    source: int
    start: float
    end: float
    clip: float = 0.0


class ModelCall(Entry, frozen=True):
    """Makes the denoised latent that the model gives of `x` at `sigma`, and with `sides` the positive and the negative."""

    x: int
    sigma: float
    sides: bool = False


class Told(Entry, frozen=True):
    """What is shown of a step, by its number."""

    step: int
    x: int
    denoised: int


class Weights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One number for each latent of a stack."""

    numbers: tuple[float, ...]
    dtype: str


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where noise comes from: `gaussian` is independent in each draw, `brownian` one path over the sigmas from `low` to `high`.

    `seed` is the run's. A path is drawn on the CPU, or on the latent's device.
    """

    kind: Literal["gaussian", "brownian"]
    seed: int
    low: float = 0.0
    high: float = 0.0
    on_cpu: bool = True


class Call(NamedTuple):
    """One model call: its sigma (0-dim fp32 on the CPU), its step, and whether it is the one that opens the step."""

    sigma: Tensor
    step: int
    opens_step: bool


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that a sampler does from the noisy latent to the value `result`. `name` is the user's word for the sampler."""

    name: str
    entries: tuple[Operation | Draw | ModelCall | Told, ...]
    result: int
    weights: tuple[Weights, ...] = ()
    sources: tuple[Source, ...] = ()

    @property
    def tells(self) -> bool:
        """Whether the sampler says which step it is at; without, each call counts as one."""
        return any(isinstance(entry, Told) for entry in self.entries)

    def calls(self) -> list[Call]:
        """The model calls, all of which are known beforehand.

        The call before step i is told opens it. Where the steps that are told do not rise by one from 0 with a call before
        each, they are counted.
        """
        number, opening = -1, list[int]()
        for entry in self.entries:
            number += isinstance(entry, ModelCall)
            if isinstance(entry, Told) and number >= 0 and number not in opening[-1:]:
                opening.append(number)
        sigmas = [torch.tensor(entry.sigma) for entry in self.entries if isinstance(entry, ModelCall)]
        if not opening:
            return [Call(sigma, step, True) for step, sigma in enumerate(sigmas)]
        steps = {call: step for step, call in enumerate(opening)}
        calls, step = list[Call](), 0
        for number, sigma in enumerate(sigmas):
            step = steps.get(number, step)
            calls.append(Call(sigma, step, number in steps))
        return calls


def encoded(program: Program) -> Tensor:
    """As bytes, uint8, 1-D: what a request carries beside its tensors."""
    return torch.frombuffer(bytearray(msgspec.msgpack.encode(program)), dtype=torch.uint8)


def decoded(data: Tensor, ndim: int, sigmas: int) -> Program:
    """The program of a request whose latent has `ndim` dimensions and which has so many `sigmas`.

    Raises:
        Refused: it is not well-formed, so that nothing of it is run.
    """
    try:
        program = msgspec.msgpack.decode(data.numpy().tobytes(), type=Program)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(
            f"the sampler's program cannot be read ({error}): use the same version of this pack everywhere."
        ) from None
    _Check(program, ndim, sigmas).all()
    return program


class _Kind(NamedTuple):
    """What a value is: a latent, or so many (`stacked`) along `dim`."""

    stacked: int = 0
    dim: int = 0


LATENT = _Kind()


class _Check:
    """Goes through a program once."""

    def __init__(self, program: Program, ndim: int, sigmas: int) -> None:
        self._program = program
        self._ndim = ndim
        self._most = ENTRIES_FOR_A_SIGMA * sigmas
        self._kinds = [LATENT]
        self._called = False

    def all(self) -> None:
        """Raises Refused with the first entry that cannot be."""
        program = self._program
        self._must(
            len(program.entries) <= self._most, f"{len(program.entries)} entries, of which {self._most} are the limit"
        )
        for weights in program.weights:
            self._must(0 < len(weights.numbers) <= MOST_STACKED, f"{len(weights.numbers)} weights")
            self._must(weights.dtype in DTYPES, f"the type {weights.dtype}")
        for source in program.sources:
            self._must(0 <= source.seed < 2**64, f"the seed {source.seed}")
            self._must(
                source.kind == "gaussian" or source.low <= source.high, f"noise from {source.low:g} to {source.high:g}"
            )
        for number, entry in enumerate(program.entries):
            try:
                self._kinds.extend(self._made(entry))
            except _Wrong as wrong:
                self._must(False, f"{wrong} in entry {number}")
        self._must(0 <= program.result < len(self._kinds) and self._kinds[program.result] == LATENT, "no result")

    def _must(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise Refused(
                f"the program of the sampler {self._program.name} is not well-formed ({otherwise}): use the same version of this "
                "pack everywhere, or another sampler."
            )

    def _made(self, entry: Operation | Draw | ModelCall | Told) -> Iterator[_Kind]:
        match entry:
            case Operation():
                yield self._operation(entry)
            case Draw():
                _need(0 <= entry.source < len(self._program.sources), f"the source {entry.source}")
                _need(self._called, "noise before the first model call")
                yield LATENT
            case ModelCall():
                self._latent(entry.x)
                self._called = True
                yield from [LATENT] * (3 if entry.sides else 1)
            case Told():
                self._latent(entry.x)
                self._latent(entry.denoised)

    def _operation(self, entry: Operation) -> _Kind:
        arguments = [*entry.arguments, *entry.keywords.values()]
        most = MOST_STACKED if entry.name == "stack" else MOST_ARGUMENTS
        _need(0 < len(arguments) <= most + 1, f"{len(arguments)} arguments of {entry.name}")
        kinds = [self._kind(argument.value) for argument in arguments if isinstance(argument, Ref)]
        _need(bool(kinds), f"no value for {entry.name}")
        match entry.name, entry.arguments:
            case "stack", _:
                dim = entry.keywords.get("dim")
                _need(all(kind == LATENT for kind in kinds) and len(kinds) == len(entry.arguments), "a stack of stacks")
                _need(
                    isinstance(dim, int) and 0 <= dim <= self._ndim and len(entry.keywords) == 1, f"the dimension {dim}"
                )
                return _Kind(len(kinds), int(str(dim)))
            case "to", (Ref(), str(dtype)):
                _need(dtype in DTYPES, f"the type {dtype}")
                return kinds[0]
            case "full_like", (Ref(), bool() | int() | float()):
                return kinds[0]
            case "sum", (Ref(), int(dim)):
                _need(kinds[0].stacked > 0 and kinds[0].dim == dim, "a sum over a latent's own dimension")
                return LATENT
            case "select", (Ref(), int(dim), int(index)):
                _need(kinds[0].dim == dim and 0 <= index < kinds[0].stacked, f"the latent {index} of a stack")
                return LATENT
            case "combine", (Ref(), int(dim), Along() as along):
                _need(along.dim == dim, f"the dimension {dim}")
                self._along(along, kinds[0])
                return LATENT
        _need(entry.name in ELEMENTWISE, f"the operation {entry.name}")
        _need({*entry.keywords} <= {*KEYWORDS}, f"the keywords {', '.join(entry.keywords)}")
        _need(all(kind == kinds[0] for kind in kinds), f"latents and stacks for {entry.name}")
        for argument in arguments:
            if isinstance(argument, Along):
                self._along(argument, kinds[0])
        return kinds[0]

    def _along(self, along: Along, stack: _Kind) -> None:
        _need(0 <= along.weights < len(self._program.weights), f"the weights {along.weights}")
        count = len(self._program.weights[along.weights].numbers)
        _need(along.dim == stack.dim and count == stack.stacked, f"{count} weights for {stack.stacked} latents")

    def _kind(self, value: int) -> _Kind:
        _need(0 <= value < len(self._kinds), f"the value {value}")
        return self._kinds[value]

    def _latent(self, value: int) -> None:
        _need(self._kind(value) == LATENT, "a stack in the place of a latent")


class _Wrong(Exception):
    """What is wrong with an entry."""


def _need(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _Wrong(otherwise)


def view_along(weights: Weights, along: Along, ndim: int) -> Tensor:
    """The vector in the shape in which it stands beside stacks of latents of `ndim` dimensions, on the CPU."""
    shape: Sequence[int] = [len(weights.numbers) if place == along.dim else 1 for place in range(ndim + 1)]
    return torch.tensor(weights.numbers, dtype=getattr(torch, weights.dtype)).view(shape)
