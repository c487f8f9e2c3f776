"""Streamed blocks in host memory that ranks share: the device's part, the copies, and equal bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from parallel_backend.comm.meter import Meter
from parallel_backend.models.comfyui.proof.rank import ProofRank, plan_for
from parallel_backend.models.comfyui.small import small
from parallel_backend.weights.stores.block_bytes import ALIGNMENT
from parallel_backend.weights.stores.store import BlockAccess
from parallel_backend.weights.stores.streamed import Streamed, staying
from tests.models.parallel_models import share_weights
from tests.support.allocations import peak_bytes
from tests.support.comfy_oracle import comfy_on_path
from tests.support.rank_parts import CPU, everyone
from tests.support.ranks import run_ranks
from tests.weights.tiny import BLOCKS, HELD, bits, check, fill, tiny

comfy_on_path()


def test_blocks_that_stay_on_the_device_are_evenly_spaced_and_fit() -> None:
    assert staying([1] * 6, 0) == frozenset()
    assert staying([1] * 6, 3) == {0, 2, 4}
    assert staying([1] * 6, 2) == {0, 3}
    assert staying([1] * 6, 6) == set(range(6))
    assert staying([4, 4, 1, 1, 1, 1], 7) == {0, 2, 3, 5}  # blocks count by their bytes
    for room in range(20):
        sizes = [5, 1, 3, 2, 4]
        assert sum(sizes[block] for block in staying(sizes, room)) <= room


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("room", [0, 2, 3])
def test_the_device_has_a_window_and_other_blocks_are_copied_each_time(ranks: int, room: int) -> None:
    """Memory for three blocks beyond the window of two keeps all blocks on the device."""
    expected = tiny("cpu")

    def rank(number: int) -> Any:
        meter = Meter()
        model = tiny("meta")
        streamed = Streamed(model, list(model.blocks), everyone("subgroup", meter), CPU, meter)
        least, kept = streamed.nbytes, streamed.kept
        streamed.materialise(CPU)
        fill(streamed, expected)
        streamed.settle()
        for name, value in expected.named_parameters():
            assert torch.equal(bits(streamed.full(name)), bits(value)), name
        size = (least - 12) // 2
        streamed.fit(room * size)
        whole, copied = [], []
        for _ in range(2):
            with streamed.forward():
                for index in range(BLOCKS):
                    with streamed.block(index):
                        whole.append(streamed.whole // size)
                        check(model.blocks[index], expected.blocks[index])
            copied.append(meter.sent["weights"] // size)
        beyond = streamed.beyond // size
        streamed.settle()
        changed = streamed.run("blocks.0.weight").values
        changed.zero_()
        streamed.settle()
        with streamed.block(0):
            assert not model.blocks[0].weight.any(), "what stays is not what it was"
        streamed.leave(True)
        return size, kept, whole, copied, beyond, streamed.whole

    found = run_ranks(ranks, rank)
    size = -(-HELD // (ranks * ALIGNMENT)) * ranks * ALIGNMENT
    stays = BLOCKS if room == 3 else room
    for this, kept, whole, copied, beyond, at_last in found:
        assert this == size
        assert kept == BLOCKS * size // ranks
        assert max(whole) == min(BLOCKS, room + 2)
        assert copied == [BLOCKS, BLOCKS + BLOCKS - stays]
        assert beyond == stays
        assert at_last == 0


def test_blocks_in_any_order_take_no_more_than_the_window_and_one_that_runs_twice_in_a_row_is_copied_once() -> None:
    def rank(number: int) -> Any:
        model, meter = tiny("meta"), Meter()
        streamed = Streamed(model, list(model.blocks), everyone("subgroup", meter), CPU, meter)
        streamed.materialise(CPU)
        size, whole = (streamed.nbytes - 12) // 2, []
        streamed.fit(size)
        for index in (0, 3, 1, 1, 4, 2, 0, 4):
            with streamed.block(index):
                whole.append(streamed.whole // size)
        streamed.fit(0)
        before = meter.sent["weights"]
        with streamed.forward():
            for index in range(BLOCKS):
                for _ in range(2):
                    with streamed.block(index):
                        pass
        return max(whole), (meter.sent["weights"] - before) // size, streamed.whole

    assert run_ranks(1, rank) == [(3, BLOCKS, 0)]


def test_a_forward_takes_only_the_window_and_its_activations() -> None:
    case = small("wan, text")

    def rank(number: int) -> Any:
        whole = ProofRank(case, plan_for(case))
        activations = peak_bytes(whole.run)
        rank = ProofRank(case, plan_for(case))
        streamed = share_weights(rank, streamed=True)
        taken = []

        class Watched(BlockAccess):
            @contextmanager
            def block(self, index: int) -> Iterator[None]:
                with streamed.block(index):
                    taken.append(streamed.whole)
                    yield

        rank.hold(Watched())
        counted = peak_bytes(rank.run)
        out = rank.run()
        assert out is not None
        return activations, counted, max(taken), streamed.nbytes - streamed.movable, torch.equal(out, case.stock())

    with torch.no_grad():
        ((activations, counted, taken, window, same),) = run_ranks(1, rank)
    assert counted == activations
    assert taken == window
    assert same


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_blocks_arrive_bit_by_bit_and_leave_no_memory() -> None:
    nothing = torch.cuda.memory_allocated()
    device, expected, model = torch.device("cuda", 0), tiny("cpu"), tiny("meta")
    streamed = Streamed(model, list(model.blocks), everyone("subgroup"), device, Meter())
    streamed.materialise(device)
    fill(streamed, expected)
    streamed.fit((streamed.nbytes - streamed.movable) // 2)
    assert torch.cuda.memory_allocated(device) > nothing
    for _ in range(3):
        for index in range(BLOCKS):
            with streamed.block(index):
                check(model.blocks[index], expected.blocks[index])
    streamed.leave(True)
    assert torch.cuda.memory_allocated(device) == nothing
