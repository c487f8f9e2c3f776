"""Blocks compiled as they come: how often, what cannot be, and that the result is the model's own.

The backend is aot_eager, which takes the same graphs as inductor and runs them as they are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from parallel_backend.models.spread.compiled import CompiledBlocks
from parallel_backend.models.spread.picture import Picture
from parallel_backend.weights.holding import Replicated
from tests.models.test_spread import CASES, TOLERANCE, Rank, plan_for, worst
from tests.models.tiny_classes import Case
from tests.ranks import run_ranks
from tests.selection import thorough
from tests.tiny_models import draw

BACKEND = "aot_eager"
PATIENCE = 300
"""Seconds for ranks that compile, which takes some on a busy machine."""


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiling(case: Case, backend: str = BACKEND, **degrees: int) -> Rank:
    """One rank of a plan, whose blocks are compiled."""
    rank = Rank(case, plan_for(case, **degrees))
    rank.hold(Replicated(), CompiledBlocks(backend))
    return rank


def graphs() -> int:
    """How often something has been compiled."""
    return int(counters["stats"]["unique_graphs"])


def flux() -> Case:
    with torch.no_grad():
        return CASES["flux"]()


def sized(case: Case, number: int) -> Case:
    """Another prompt: a random batch of two to four, picture, text and time."""
    generator = random.Random(number)
    batch, tokens = generator.randint(2, 4), generator.randint(2, 40)
    height, width = (generator.randint(5, 20) for _ in range(2))
    given = {
        "context": draw(batch, tokens, case.arguments["context"].shape[2], seed=number),
        "y": draw(batch, 32, seed=number + 100),
        "guidance": torch.full((batch,), 3.5),
    }
    x, time = draw(batch, 16, height, width, seed=number), torch.full((batch,), generator.random())
    return replace(case, x=x, timestep=time, arguments=given)


def one_of(case: Case) -> Case:
    """The first of a batch."""
    first = {name: value[:1] for name, value in case.arguments.items()}
    return replace(case, x=case.x[:1], timestep=case.timestep[:1], arguments=first)


@pytest.mark.parametrize("sizes", [6, pytest.param(20, marks=thorough)])
def test_each_kind_is_compiled_once_for_random_sizes(sizes: int) -> None:
    case = flux()
    rank = compiling(case)
    for number in range(sizes):
        rank.case = sized(case, number)
        rank.picture = Picture(tuple(rank.case.x.shape), (2, 2))
        with torch.no_grad():
            expected = rank.case.stock()
        out = rank.run()
        assert out is not None
        assert worst([[out]], expected) <= TOLERANCE
        assert graphs() == 2, "a double and a single block"
    for parameter in rank.module.parameters():  # as a LoRA of another strength does
        parameter.data *= 1.01
    rank.run()
    assert graphs() == 2


@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        pytest.param("qwen-image", {"ulysses": 2}, id="ulysses 2"),
        pytest.param("flux", {"pipefusion": 2, "patches": 3}, id="3 patches over 2 stages", marks=thorough),
        pytest.param("wan, text", {"ring": 2}, id="wan, ring 2", marks=thorough),
    ],
)
def test_a_split_gives_the_models_own_result(name: str, degrees: dict[str, int]) -> None:
    with torch.no_grad():
        case = CASES[name]()
        expected = case.stock()
    plan = plan_for(case, **degrees)

    def on_rank(_: int) -> list[Tensor]:
        rank = compiling(case, **degrees)
        outs = [rank.run(), rank.by_patch()]
        assert graphs() >= 1
        assert rank.forward.uncompiled() == ()
        return [out for out in outs if out is not None]

    assert worst(run_ranks(plan.world_size, on_rank, PATIENCE), expected) <= TOLERANCE


def broken(graph: Any, inputs: Any) -> Callable[..., Any]:
    raise RuntimeError("no compiler here")


def test_a_compiler_that_fails_is_named_once_and_the_blocks_run_as_they_are() -> None:
    case = flux()
    rank = compiling(case, "a backend that is not there")
    with torch.no_grad():
        expected = case.stock()
    for _ in range(2):
        out = rank.run()
        assert out is not None
        assert torch.equal(out, expected)
    assert len(rank.forward.uncompiled()) == 2
    assert rank.forward.uncompiled() == ()
    torch._dynamo.register_backend(broken, name="broken")  # type: ignore[no-untyped-call]
    rank.hold(Replicated(), CompiledBlocks("broken"))
    out = rank.run()
    assert out is not None
    assert torch.equal(out, expected)
    double, single = rank.forward.uncompiled()
    assert double.startswith("DoubleStreamBlock is not compiled: ")
    assert single.startswith("SingleStreamBlock is not compiled: ")


def test_beyond_torchs_limit_of_graphs_a_kind_runs_as_it_is() -> None:
    """Of a batch of one, each kind's second."""
    several = sized(flux(), 0)
    rank = compiling(several, "eager")
    with torch._dynamo.config.patch(recompile_limit=1):
        for case in (several, one_of(several)):
            rank.case = case
            rank.picture = Picture(tuple(case.x.shape), (2, 2))
            with torch.no_grad():
                expected = case.stock()
            out = rank.run()
            assert out is not None
            assert worst([[out]], expected) <= TOLERANCE
    assert graphs() == 2
    assert len(rank.forward.uncompiled()) == 2


def test_what_the_compiler_cannot_take_whole_runs_as_it_is() -> None:
    with torch.no_grad():
        case = CASES["z-image, reference"]()
        expected = case.stock()
    rank = compiling(case)
    out = rank.run()
    assert out is not None
    assert worst([[out]], expected) <= TOLERANCE
    assert rank.forward.uncompiled()
