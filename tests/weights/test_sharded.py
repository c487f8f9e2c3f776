"""Sharded blocks: tensors of any dtype, over any number of ranks, return bit by bit; at most two blocks are
gathered at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parallel_backend.comm.meter import Meter, Trace
from parallel_backend.errors import Refused
from parallel_backend.weights.stores.block_bytes import ALIGNMENT
from parallel_backend.weights.stores.sharded import Sharded
from tests.support.rank_parts import CPU, everyone
from tests.support.ranks import run_ranks
from tests.weights.tiny import BLOCKS, HELD, bits, check, fill, tiny


def filled(meter: Meter, most: Callable[[int], int] = int, mark: Callable[[], object] = lambda: None) -> Any:
    """Return the model sharded over all ranks, its store, the same model unsharded, and the bytes of this rank's part."""
    model, expected = tiny("meta"), tiny("cpu")
    sharded = Sharded(model, list(model.blocks), everyone("weights", meter), most, mark)
    sharded.materialise(CPU)
    return model, sharded, expected, fill(sharded, expected)


def most_of_all(number: int) -> int:
    value = torch.tensor(number)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return int(value)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_blocks_return_bit_by_bit_and_at_most_two_are_gathered(ranks: int) -> None:
    def rank(number: int) -> Any:
        meter, whole = Meter(), []
        model, sharded, expected, held = filled(meter)
        for _ in range(2):
            with sharded.forward():
                for index in range(BLOCKS):
                    with sharded.block(index):
                        whole.append(sharded.whole)
                        check(model.blocks[index], expected.blocks[index])
            assert sharded.whole == 0
        sent = meter.sent["weights"]
        sharded.leave(True)
        for name, value in expected.named_parameters():
            assert torch.equal(bits(sharded.full(name)), bits(value)), name
        return held, sharded.nbytes, whole, sent

    found = run_ranks(ranks, rank)
    size = -(-HELD // (ranks * ALIGNMENT)) * ranks * ALIGNMENT
    outside = 3 * 4
    assert sum(held for held, *_ in found) == sum(p.nbytes for p in tiny("cpu").blocks.parameters()) + ranks * outside
    for _, said, whole, sent in found:
        assert sent == 2 * BLOCKS * (ranks - 1) * size // ranks
        assert said == BLOCKS * size // ranks + outside
        assert max(whole) == 2 * size


FORWARDS: list[list[list[int]]] = [
    [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 2, 4]],
    [[0, 1, 1, 1, 2, 3, 3, 4]],
    [],
    [[3], [0, 1]],
]
"""The blocks of each forward of a model call, by rank: all blocks, some repeated at once, some left out, or none."""


def test_ranks_with_different_forwards_issue_matching_collectives() -> None:
    def rank(number: int) -> Any:
        meter, marks = Meter(trace=Trace("", number)), []  # a trace adds numbers to gathers
        model, sharded, expected, _ = filled(meter, most_of_all, functools.partial(marks.append, number))
        for _ in range(2):
            with sharded.model_call(len(FORWARDS[number])):
                for blocks in FORWARDS[number]:
                    with sharded.forward():
                        for index in blocks:
                            with sharded.block(index):
                                check(model.blocks[index], expected.blocks[index])
                    assert sharded.whole == 0
        return meter.sent["weights"], len(marks)

    found = run_ranks(4, rank)
    assert len(set(found)) == 1, "all send and wait alike"
    assert found[0][1] == 2 * max(map(len, FORWARDS)) * BLOCKS, "signs of progress wherever a block has come"


def test_a_block_that_runs_after_a_later_one_is_refused() -> None:
    def rank(_: int) -> str:
        _, sharded, *_ = filled(Meter())
        with pytest.raises(Refused) as refused, sharded.forward(), sharded.block(3), sharded.block(1):
            pass
        return str(refused.value)

    assert (
        run_ranks(2, rank)
        == [
            "the model runs its block 1 of 5 after its block 3, which sharded weights do not allow: choose weights replicated or "
            "streamed in Parallel Plan."
        ]
        * 2
    )


def test_ranks_that_gather_different_blocks_raise_at_once() -> None:
    """Only a fault in the pack would cause this. A debug run, such as a traced one, sends a number with each gather."""

    def rank(number: int) -> str:
        _, sharded, *_ = filled(Meter(trace=Trace("", number)))
        with pytest.raises(RuntimeError) as different:
            sharded._begin(2 + number)
        return str(different.value)

    assert run_ranks(2, rank) == ["ranks gather different blocks at once, by rank: 2, 3"] * 2


def test_two_blocks_cannot_share_a_tensor() -> None:
    shared = nn.Linear(2, 2, device="meta")
    model = nn.Sequential(shared, nn.Sequential(shared))
    with pytest.raises(AssertionError, match=r"two blocks share 0\.weight"):
        Sharded(model, list(model), everyone("weights"))


def test_connections_for_gathers_are_opened_when_weights_are_loaded() -> None:
    def rank(_: int) -> list[int]:
        meter = Meter()
        model, sharded, expected, _ = filled(meter)
        sent = []
        for _ in range(2):
            sharded.settle()
            sent.append(meter.sent["weights"])
        with sharded.model_call(1), sharded.forward():
            for index in range(BLOCKS):
                with sharded.block(index):
                    check(model.blocks[index], expected.blocks[index])
        return [*sent, meter.sent["weights"]]

    share = -(-HELD // (2 * ALIGNMENT)) * ALIGNMENT
    assert run_ranks(2, rank) == [[share, share, (1 + BLOCKS) * share]] * 2
