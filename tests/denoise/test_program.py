"""Malformed programs that arrive at a worker are refused, in one sentence, before any of their entries runs."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from parallel_backend.denoise.noise import LatentNoise
from parallel_backend.denoise.program import (
    Draw,
    ModelEvaluation,
    NoiseSource,
    Operation,
    Program,
    ProgramEntry,
    Ref,
    StackWeights,
    StepEvent,
    Weights,
    encoded,
)
from parallel_backend.denoise.replay import DeviceProgram, Prediction, script_of
from parallel_backend.errors import Refused
from tests.support.programs import program_of

SIGMAS = torch.tensor([1.0, 0.6, 0.2, 0.0])
CPU = torch.device("cpu")


def made(*entries: ProgramEntry, result: int = 1, **others: Any) -> Program:
    """Return a program that begins with one model call."""
    return Program("made", (ModelEvaluation(0, 1.0), *entries), result, **others)  # type: ignore[arg-type]


def read(program: Program | Tensor) -> DeviceProgram:
    return script_of(program if isinstance(program, Tensor) else encoded(program), 4, len(SIGMAS), CPU)


TWO = Operation("stack", (Ref(0), Ref(1)), {"dim": 1})
WEIGHTS = (Weights((0.5, 0.5), "float32"),)

BROKEN: dict[str, Program] = {
    "an unknown operation": made(Operation("save", (Ref(0),))),
    "torch's, which is not local": made(Operation("linalg_norm", (Ref(0),))),
    "a value that is not there yet": made(Operation("neg", (Ref(2),))),
    "a negative value": made(Operation("neg", (Ref(-1),))),
    "no value": made(Operation("add", (1.0, 2.0))),
    "too few arguments": made(Operation("lerp", (Ref(0), Ref(1)))),
    "too many arguments": made(Operation("add", (Ref(0),) * 12)),
    "an argument that torch has not": made(Operation("neg", (Ref(0),), {"out": Ref(1)})),
    "a word for a number": made(Operation("mul", (Ref(0), "two"))),
    "a type that is none": made(Operation("to", (Ref(0), "load"))),
    "no result": made(result=7),
    "a stack for a result": made(TWO, result=2),
    "a stack for the model": made(TWO, ModelEvaluation(2, 0.5)),
    "a stack beside a latent": made(TWO, Operation("add", (Ref(2), Ref(0)))),
    "a stack of stacks": made(TWO, Operation("stack", (Ref(2),), {"dim": 0})),
    "a stack in no dimension": made(Operation("stack", (Ref(0),), {"dim": 9})),
    "a sum over rows": made(TWO, Operation("sum", (Ref(2), 3))),
    "a sum of a latent": made(Operation("sum", (Ref(0), 0))),
    "a latent that the stack has not": made(TWO, Operation("select", (Ref(2), 1, 2))),
    "weights that are not there": made(TWO, Operation("combine", (Ref(2), 1, StackWeights(0, 1)))),
    "too few weights": made(TWO, Operation("mul", (Ref(2), StackWeights(0, 1))), weights=(Weights((1.0,), "float32"),)),
    "weights over rows": made(TWO, Operation("mul", (Ref(2), StackWeights(0, 2))), weights=WEIGHTS),
    "weights beside a latent": made(Operation("mul", (Ref(0), StackWeights(0, 1))), weights=WEIGHTS),
    "weights of no type": made(weights=(Weights((1.0,), "object"),)),
    "no weights": made(weights=(Weights((), "float32"),)),
    "a source that is not there": made(Draw(0, 1.0, 0.5)),
    "noise before the model": Program("made", (Draw(0, 1.0, 0.5),), 1, sources=(NoiseSource("gaussian", 1),)),
    "a schedule that rises": made(sources=(NoiseSource("brownian", 1, 0.9, 0.1),)),
    "a seed below 0": made(sources=(NoiseSource("gaussian", -1),)),
    "a latent in another type": made(Operation("to", (Ref(0), "float64")), ModelEvaluation(2, 0.5)),
    "a result in another type": made(Operation("gt", (Ref(0), 0.0)), result=2),
    "what tells a stack": made(TWO, StepEvent(0, 2, 1)),
    "too long": made(*[Operation("neg", (Ref(0),))] * (4096 * 4)),
}


@pytest.mark.parametrize("program", BROKEN.values(), ids=BROKEN)
def test_a_malformed_program_is_refused(program: Program) -> None:
    with pytest.raises(
        Refused, match=r"^the program of the sampler made (is not well-formed|cannot be run) \(.+\): use "
    ):
        read(program)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1, 2]),
        msgspec.msgpack.encode({"name": "x", "entries": [], "result": 0, "more": 1}),
    ],
)
def test_bytes_that_are_no_program_are_refused(data: bytes) -> None:
    with pytest.raises(Refused, match="the sampler's program cannot be read"):
        read(torch.tensor(list(data), dtype=torch.uint8))


def test_changed_bytes_are_refused_or_give_another_program() -> None:
    chance = random.Random(4)
    sent = bytearray(encoded(program_of("sa_solver", SIGMAS, torch.empty(1, 4, 6, 5))).numpy().tobytes())
    refused = 0
    for _ in range(300):
        changed = bytearray(sent)
        changed[chance.randrange(len(changed))] = chance.randrange(256)
        try:
            read(torch.frombuffer(changed, dtype=torch.uint8))
        except Refused:
            refused += 1
    assert 100 < refused < 300


def test_values_are_freed_after_their_last_use() -> None:
    script = read(program_of("dpmpp_2m", SIGMAS, torch.empty(1, 4, 6, 5)))
    used = [number for step in script._steps for number in step.last_used]
    assert len(used) == len({*used})
    held, most = 1, 0
    for step in script._steps:
        held += not isinstance(step.entry, StepEvent)
        most = max(most, held)
        held -= len(step.last_used)
    assert most <= 6
    assert held == 1


@pytest.mark.parametrize(
    ("told", "opening"),
    [
        ([0, 1, 2], [(0, True), (1, True), (2, True)]),
        ([0, 5, 5], [(0, True), (1, True), (2, True)]),
        ([3, 2, 1], [(0, True), (1, True), (2, True)]),
        ([None, None, None], [(0, True), (1, True), (2, True)]),
        ([0, None, 1], [(0, True), (0, False), (1, True)]),
        ([None, 0, 1], [(0, False), (0, True), (1, True)]),
    ],
)
def test_calls_belong_to_reported_or_counted_steps(told: list[int | None], opening: list[tuple[int, bool]]) -> None:
    entries: list[ProgramEntry] = []
    for number, step in enumerate(told):
        entries.append(ModelEvaluation(number, 1.0 - number / 4))
        if step is not None:
            entries.append(StepEvent(step, number, number + 1))
    program = Program("made", tuple(entries), 3)  # type: ignore[arg-type]
    assert [(call.step, call.opens_step) for call in program.calls()] == opening
    assert program.shows_steps == any(step is not None for step in told)


def test_branches_of_the_last_model_call_stay_when_a_step_cache_answers() -> None:
    """Without a negative prompt the other branch is zeros."""
    entries = [ModelEvaluation(0, 1.0, True), ModelEvaluation(1, 0.5, True), Operation("add", (Ref(5), Ref(6)))]
    script = read(Program("made", tuple(entries), 7))
    x = torch.full((1, 1, 2, 2), 2.0)

    def run(*sides: tuple[Tensor, ...]) -> Tensor:
        steps = script.replay(x, LatentNoise(tuple(x.shape), CPU))
        next(steps)
        steps.send(Prediction(x, sides[0]))
        with pytest.raises(StopIteration) as end:
            steps.send(Prediction(x, sides[1]))
        return end.value.value  # type: ignore[no-any-return]

    assert torch.equal(run((x, 3 * x), ()), 4 * x)
    assert torch.equal(run((x, 3 * x), (2 * x,)), 2 * x)
