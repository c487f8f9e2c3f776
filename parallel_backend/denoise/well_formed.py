"""The check of a sampler's program that arrived in a request, before any of it runs: schema, sizes and every value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
from torch import Tensor

from ..errors import Refused
from .program import (
    DTYPES,
    ELEMENTWISE,
    KEYWORDS,
    Draw,
    ModelEvaluation,
    Operation,
    Program,
    Ref,
    StackWeights,
    StepEvent,
)

ENTRIES_FOR_A_SIGMA = 4096
"""The largest number of a program's entries for each sigma. ComfyUI's own samplers have some 40."""

MOST_STACKED = 256
MOST_ARGUMENTS = 8


def decoded(data: Tensor, ndim: int, sigmas: int) -> Program:
    """Decode the program of a request and check it.

    Args:
        data: the bytes that `program.encoded` returned.
        ndim: the number of the latent's dimensions.
        sigmas: the number of the request's sigmas.

    Raises:
        Refused: the program is not well-formed. Nothing of it runs.
    """
    try:
        program = msgspec.msgpack.decode(data.numpy().tobytes(), type=Program)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(
            f"the sampler's program cannot be read ({error}): use the same version of this pack on all machines."
        ) from None
    _Check(program, ndim, sigmas).all()
    return program


class _Kind(NamedTuple):
    """The kind of a value: a latent, or a stack of `stacked` latents along `dim`."""

    stacked: int = 0
    dim: int = 0


LATENT = _Kind()


class _Check:
    """The check of one program, entry by entry."""

    def __init__(self, program: Program, ndim: int, sigmas: int) -> None:
        self._program = program
        self._ndim = ndim
        self._most = ENTRIES_FOR_A_SIGMA * sigmas
        self._kinds = [LATENT]
        self._called = False

    def all(self) -> None:
        """Raise Refused for the first entry that is not well-formed."""
        program = self._program
        self._must(
            len(program.entries) <= self._most, f"{len(program.entries)} entries, more than the limit of {self._most}"
        )
        for weights in program.weights:
            self._must(
                0 < len(weights.numbers) <= MOST_STACKED, f"{len(weights.numbers)} weights, not 1 to {MOST_STACKED}"
            )
            self._must(weights.dtype in DTYPES, f"unknown dtype {weights.dtype}")
        for source in program.sources:
            self._must(0 <= source.seed < 2**64, f"the seed {source.seed} is not an unsigned 64-bit number")
            self._must(
                source.kind == "gaussian" or source.low <= source.high,
                f"reversed sigmas {source.low:g} to {source.high:g}",
            )
        for number, entry in enumerate(program.entries):
            try:
                self._kinds.extend(self._results(entry))
            except _Wrong as wrong:
                self._must(False, f"entry {number}: {wrong}")
        self._must(
            0 <= program.result < len(self._kinds) and self._kinds[program.result] == LATENT,
            "the result is not a latent",
        )

    def _must(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise Refused(
                f"the program of the sampler {self._program.name} is not well-formed ({otherwise}): use the same version of this "
                "pack on all machines, or another sampler."
            )

    def _results(self, entry: Operation | Draw | ModelEvaluation | StepEvent) -> Iterator[_Kind]:
        match entry:
            case Operation():
                yield self._operation(entry)
            case Draw():
                _need(0 <= entry.source < len(self._program.sources), f"unknown noise source {entry.source}")
                _need(self._called, "noise before the first model call")
                yield LATENT
            case ModelEvaluation():
                self._latent(entry.x)
                self._called = True
                yield from [LATENT] * (3 if entry.sides else 1)
            case StepEvent():
                self._latent(entry.x)
                self._latent(entry.denoised)

    def _operation(self, entry: Operation) -> _Kind:
        arguments = [*entry.arguments, *entry.keywords.values()]
        most = MOST_STACKED if entry.name == "stack" else MOST_ARGUMENTS
        _need(0 < len(arguments) <= most + 1, f"{entry.name} has {len(arguments)} arguments, not 1 to {most + 1}")
        kinds = [self._kind(argument.value) for argument in arguments if isinstance(argument, Ref)]
        _need(bool(kinds), f"{entry.name} has no latent as an argument")
        match entry.name, entry.arguments:
            case "stack", _:
                dim = entry.keywords.get("dim")
                _need(
                    all(kind == LATENT for kind in kinds) and len(kinds) == len(entry.arguments),
                    "stack takes only latents",
                )
                _need(
                    isinstance(dim, int) and 0 <= dim <= self._ndim and len(entry.keywords) == 1,
                    f"invalid dimension {dim}",
                )
                return _Kind(len(kinds), int(str(dim)))
            case "to", (Ref(), str(dtype)):
                _need(dtype in DTYPES, f"unknown dtype {dtype}")
                return kinds[0]
            case "full_like", (Ref(), bool() | int() | float()):
                return kinds[0]
            case "sum", (Ref(), int(dim)):
                _need(kinds[0].stacked > 0 and kinds[0].dim == dim, "sum over a dimension that is not a stack's")
                return LATENT
            case "select", (Ref(), int(dim), int(index)):
                _need(
                    kinds[0].dim == dim and 0 <= index < kinds[0].stacked,
                    f"the stack has no latent {index} along dimension {dim}",
                )
                return LATENT
            case "combine", (Ref(), int(dim), StackWeights() as along):
                _need(along.dim == dim, f"invalid dimension {dim}")
                self._along(along, kinds[0])
                return LATENT
        _need(entry.name in ELEMENTWISE, f"unknown operation {entry.name}")
        _need({*entry.keywords} <= {*KEYWORDS}, f"unknown keywords among {', '.join(entry.keywords)}")
        _need(all(kind == kinds[0] for kind in kinds), f"{entry.name} mixes latents and stacks")
        for argument in arguments:
            if isinstance(argument, StackWeights):
                self._along(argument, kinds[0])
        return kinds[0]

    def _along(self, along: StackWeights, stack: _Kind) -> None:
        _need(0 <= along.weights < len(self._program.weights), f"unknown weights {along.weights}")
        count = len(self._program.weights[along.weights].numbers)
        _need(along.dim == stack.dim and count == stack.stacked, f"{count} weights for {stack.stacked} latents")

    def _kind(self, value: int) -> _Kind:
        _need(0 <= value < len(self._kinds), f"unknown value {value}")
        return self._kinds[value]

    def _latent(self, value: int) -> None:
        _need(self._kind(value) == LATENT, "a stack instead of a latent")


class _Wrong(Exception):
    """The error for an entry that is not well-formed."""


def _need(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _Wrong(otherwise)
