"""Compiled blocks: the number of compilations, blocks that cannot be compiled, and results equal to the model's own.

The backend is aot_eager, which takes the same graphs as inductor and runs them without changes.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from parallel_backend.models.comfyui.features.compile import COMPILED
from parallel_backend.models.comfyui.proof.rank import ProofRank, plan_for
from parallel_backend.models.comfyui.small import Case, small
from parallel_backend.models.sequence_parallel.compiled import CompiledBlocks
from parallel_backend.models.sequence_parallel.picture import Picture
from parallel_backend.weights.adapters.lora import Adapter, AdapterSet
from parallel_backend.weights.files.keymap import Piece
from parallel_backend.weights.stores.replicated import ReplicatedStore
from parallel_backend.weights.stores.store import BlockAccess
from tests.models.parallel_models import TOLERANCE, worst
from tests.support.rank_parts import patching
from tests.support.ranks import run_ranks
from tests.support.selection import thorough
from tests.support.tiny.models import draw

BACKEND = "aot_eager"
SEVERAL = range(2, 5)
"""Batch sizes of two to four."""

PATIENCE = 300
"""Seconds to wait for ranks that compile, which is slow on a busy machine."""


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiling(case: Case, backend: str = BACKEND, **degrees: int) -> ProofRank:
    """Return one rank of a plan with compiled blocks."""
    rank = ProofRank(case, plan_for(case, **degrees))
    rank.hold(BlockAccess(), CompiledBlocks(backend, COMPILED))
    return rank


def graphs() -> int:
    """Return the number of graphs that have been compiled."""
    return int(counters["stats"]["unique_graphs"])


def flux() -> Case:
    with torch.no_grad():
        return small("flux")


def sized(case: Case, number: int, batches: range = SEVERAL) -> Case:
    """Return another call of the model, in its dtype, with a random batch, picture size, text length and time."""
    generator = random.Random(number)
    dtype = case.arguments["context"].dtype
    batch, tokens = generator.choice(batches), generator.randint(2, 40)
    height, width = (generator.randint(5, 20) for _ in range(2))
    given = {
        "context": draw(batch, tokens, case.arguments["context"].shape[2], seed=number).to(dtype),
        "y": draw(batch, 32, seed=number + 100).to(dtype),
        "guidance": torch.full((batch,), 3.5),
    }
    x, time = draw(batch, 16, height, width, seed=number).to(dtype), torch.full((batch,), generator.random())
    return replace(case, x=x, timestep=time, arguments=given)


def lora_on(module: nn.Module) -> Callable[[float], None]:
    """Return a function that applies a LoRA to one block of each kind with a given strength, and removes the previous LoRA."""
    names = ("double_blocks.0.img_attn.qkv.weight", "single_blocks.1.linear1.weight")
    shapes = {name: module.get_parameter(name).shape for name in names}
    keys = {name: Piece(name, 0, shape[0], (shape[1],)) for name, shape in shapes.items()}
    tensors = {name + "u": 0.2 * draw(shape[0], 4, seed=4) for name, shape in shapes.items()}
    tensors |= {name + "d": 0.2 * draw(4, shape[1], seed=5) for name, shape in shapes.items()}
    merging = patching(module, ReplicatedStore(module), keys)

    def merge(strength: float) -> None:
        parts = {name: {"up": name + "u", "down": name + "d"} for name in names}
        adapters = {name: [Adapter("lora", each, strength=strength, alpha=4.0)] for name, each in parts.items()}
        merging.merge(AdapterSet(adapters, tensors))

    return merge


def run_all(rank: ProofRank, prompts: Iterable[Case]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each prompt's result and ComfyUI's own, with another LoRA strength for each prompt."""
    lora = lora_on(rank.module)
    for number, rank.case in enumerate(prompts):
        rank.picture = Picture(tuple(rank.case.x.shape), (2, 2))
        with torch.no_grad():
            lora(0.1 * number - 0.3)
            expected = rank.case.stock()
        out = rank.run()
        assert out is not None
        yield out, expected
    lora(0.0)


@pytest.mark.parametrize(
    ("prompts", "batches", "compiled"),
    [
        pytest.param(4, SEVERAL, 2, id="4 of several"),
        pytest.param(20, SEVERAL, 2, marks=thorough, id="20 of several"),
        pytest.param(20, range(1, 2), 2, marks=thorough, id="20 of one"),
        pytest.param(20, range(1, 5), 4, marks=thorough, id="20 of one and of several"),
    ],
)
def test_each_kind_is_compiled_once_for_random_sizes_and_strengths(prompts: int, batches: range, compiled: int) -> None:
    """The kinds are a double and a single block. A batch of one between other batches adds one graph for each kind."""
    case = flux()
    cases = [sized(case, number, batches) for number in range(prompts)]
    for out, expected in run_all(compiling(case), cases):
        assert worst([[out]], expected) <= TOLERANCE
        assert 2 <= graphs() <= compiled
    assert graphs() == compiled
    assert prompts < 20 or {each.x.shape[0] for each in cases} == {*batches}


@thorough
def test_each_kind_is_compiled_once_for_each_dtype() -> None:
    """The workers' result in bf16 is as near to the fp32 result as ComfyUI's own."""
    case = flux()
    exact = copy.deepcopy(case)
    rank = compiling(case)
    merge = lora_on(exact.model)
    for count, dtype in ((2, torch.float32), (4, torch.bfloat16)):
        rank.module.to(dtype)  # ComfyUI's model shares these parameters
        arguments = {name: given.to(dtype) for name, given in case.arguments.items() if given is not None}
        typed = replace(case, arguments=arguments)
        for number, (out, expected) in enumerate(run_all(rank, (sized(typed, number) for number in range(10)))):
            assert out.dtype == expected.dtype == dtype
            with torch.no_grad():
                merge(0.1 * number - 0.3)
                in_fp32 = sized(exact, number).stock()
            ours, theirs = (worst([[found.float()]], in_fp32) for found in (out, expected))
            assert ours <= 1.5 * theirs + TOLERANCE
            assert graphs() == count


@thorough  # derive/test_derive::test_a_class_that_nobody_has_seen_is_derived compiles blocks under several splits
@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        pytest.param("qwen-image", {"ulysses": 2}, id="ulysses 2"),
        pytest.param("flux", {"pipefusion": 2, "patches": 3}, id="3 patches over 2 stages"),
        pytest.param("wan, text", {"ring": 2}, id="wan, ring 2"),
    ],
)
def test_a_split_gives_the_models_own_result(name: str, degrees: dict[str, int]) -> None:
    with torch.no_grad():
        case = small(name)
        expected = case.stock()
    plan = plan_for(case, **degrees)

    def on_rank(_: int) -> list[Tensor]:
        rank = compiling(case, **degrees)
        outs = [rank.run(), rank.by_patch()]
        assert graphs() >= 1
        assert rank.forward.uncompiled() == ()
        assert rank.forward.compiling() > 0
        rank.run()
        assert rank.forward.compiling() == 0
        return [out for out in outs if out is not None]

    assert worst(run_ranks(plan.world_size, on_rank, PATIENCE), expected) <= TOLERANCE


def broken(graph: Any, inputs: Any) -> Callable[..., Any]:
    raise RuntimeError("no compiler here")


def test_a_failing_compiler_is_reported_once_and_the_blocks_run_uncompiled() -> None:
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
    rank.hold(BlockAccess(), CompiledBlocks("broken", COMPILED))
    out = rank.run()
    assert out is not None
    assert torch.equal(out, expected)
    double, single = rank.forward.uncompiled()
    assert double.startswith("DoubleStreamBlock is not compiled: ")
    assert single.startswith("SingleStreamBlock is not compiled: ")


# test_a_failing_compiler_is_reported_once_and_the_blocks_run_uncompiled has blocks that torch gives up.
@thorough
def test_a_kind_runs_uncompiled_beyond_torchs_limit_of_graphs() -> None:
    """A batch of one is the second graph of each kind, and the limit here is one graph."""
    several, one = (sized(flux(), 0, batches) for batches in (SEVERAL, range(1, 2)))
    rank = compiling(several, "eager")
    with torch._dynamo.config.patch(recompile_limit=1):
        for case in (several, replace(one, model=several.model)):
            rank.case = case
            rank.picture = Picture(tuple(case.x.shape), (2, 2))
            with torch.no_grad():
                expected = case.stock()
            out = rank.run()
            assert out is not None
            assert worst([[out]], expected) <= TOLERANCE
    assert graphs() == 2
    assert len(rank.forward.uncompiled()) == 2


def test_a_block_that_the_compiler_cannot_take_in_one_graph_runs_uncompiled() -> None:
    with torch.no_grad():
        case = small("z-image, reference")
        expected = case.stock()
    rank = compiling(case)
    out = rank.run()
    assert out is not None
    assert worst([[out]], expected) <= TOLERANCE
    assert rank.forward.uncompiled()
