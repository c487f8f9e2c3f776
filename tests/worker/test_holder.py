"""The holder on real ranks: models that stay, the order in which they leave, and equal decisions of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

from parallel_backend.comm.communicator import Communicator
from parallel_backend.comm.meter import Meter
from parallel_backend.diffusion import ModelSpec
from parallel_backend.weights.stores.replicated import ALONE, ReplicatedStore
from parallel_backend.weights.stores.sharded import Sharded
from parallel_backend.weights.stores.store import WeightStore
from parallel_backend.worker.memory.holder import ModelHolder
from parallel_backend.worker.memory.rank_memory import Allowance, OutOfMemory, RankMemory
from parallel_backend.worker.process.status import RankProgress
from tests.support.ranks import run_ranks
from tests.weights.tiny import Keeping

CPU = torch.device("cpu")
A, B, C = (ModelSpec("comfyui", name, 0, 0, "float32") for name in "abc")
ROWS = 8
ROW = 4 * ROWS * ROWS
"""Bytes of the part of `Rows(1)`."""

PLENTY = Allowance(limit=1 << 30)


class Rows:
    """A part of `rows` times ROW bytes, filled with a value. It is sharded over all ranks, shared between equal ranks, or
    neither.
    """

    def __init__(self, rows: int, value: float = 1.0, sharded: bool = False, sharers: Communicator = ALONE) -> None:
        self.value = value
        self.fills = 0
        self.module = nn.Linear(ROWS, ROWS * rows, bias=False, device="meta")
        self.store: WeightStore = ReplicatedStore(self.module, sharers)
        if sharded:
            everyone = Communicator("weights", dist.group.WORLD, CPU, False, Meter())
            self.store = self.sharded = Sharded(self.module, [self.module], everyone)

    def fill(self) -> None:
        self.fills += 1
        self.store.materialise(CPU)
        self.store.run("weight").values.fill_(self.value)


def all_true(flag: bool) -> bool:
    value = torch.tensor(int(flag))
    dist.all_reduce(value, dist.ReduceOp.MIN)
    return bool(value)


def holder(host_reserve: int = 0) -> ModelHolder:
    return ModelHolder(RankMemory(CPU, 1, host_reserve), all_true if dist.is_initialized() else bool, RankProgress())


def on_device(holder: ModelHolder) -> dict[str, int]:
    return {spec.path: nbytes // ROW for spec, nbytes in holder.on_device().items()}


def on_host(holder: ModelHolder) -> dict[str, int]:
    return {spec.path: nbytes // ROW for spec, nbytes in holder.on_host().items()}


def test_several_models_stay_while_they_fit_and_the_least_recently_used_goes_first():
    held = holder()
    limit = Allowance(limit=5 * ROW)
    a = held.hold(A, "whole", lambda: Rows(2), limit)
    b = held.hold(B, "whole", lambda: Rows(2), limit)
    assert on_device(held) == {"a": 2, "b": 2}
    assert held.hold(A, "whole", pytest.fail, limit) is a
    held.hold(C, "whole", lambda: Rows(2), limit)
    assert on_device(held) == {"a": 2, "c": 2}
    assert on_host(held) == {"b": 2}
    assert held.restored == 0
    assert held.hold(B, "whole", pytest.fail, limit) is b
    assert b.fills == 1
    assert held.restored == 2 * ROW
    assert on_device(held) == {"c": 2, "b": 2}
    assert on_host(held) == {"a": 2}


def test_activations_make_other_models_leave_but_not_the_one_in_use_and_another_arrangement_replaces_the_old_one():
    held = holder()
    held.hold(A, "whole", lambda: Rows(2), PLENTY)
    held.hold(B, "whole", lambda: Rows(2), PLENTY)
    for limit in (5, 3):
        held.hold(B, "whole", pytest.fail, Allowance(limit=limit * ROW, working=2 * ROW))
        assert on_device(held) == {"b": 2}
    held.hold(B, "half", lambda: Rows(1), PLENTY)
    assert on_device(held) == {"b": 1}
    assert on_host(held) == {"a": 2}


def test_without_room_on_the_host_a_part_is_dropped_and_loaded_again():
    held = holder(host_reserve=1 << 60)
    first = held.hold(A, "whole", lambda: Rows(2), PLENTY)
    held.release(A)
    assert on_device(held) == on_host(held) == {}
    again = held.hold(A, "whole", lambda: Rows(2), PLENTY)
    assert again is not first
    assert held.restored == 0


def test_a_part_larger_than_the_limit_runs_out_of_memory_and_the_next_fits():
    held = holder()
    held.hold(B, "whole", lambda: Rows(2), PLENTY)
    with pytest.raises(OutOfMemory, match=f"{4 * ROW} bytes under a limit of {3 * ROW} bytes"):
        held.hold(A, "whole", lambda: Rows(4), Allowance(limit=3 * ROW))
    assert held.requested_bytes == 4 * ROW
    assert held.free() == 3 * ROW
    assert on_device(held) == {}
    held.hold(B, "whole", pytest.fail, Allowance(limit=3 * ROW))
    assert on_device(held) == {"b": 2}


def test_freed_memory_leaves_the_process():
    resident = psutil.Process().memory_info
    before = resident().rss
    small = [torch.ones(64 << 8) for _ in range(1600)]  # 64 KiB each, which the C library takes from its heap
    taken = resident().rss - before
    assert taken > 90 << 20
    last = small[-1]  # lies at the heap's end, so that the heap cannot shrink
    del small
    RankMemory(CPU, 1).give_back()
    assert resident().rss - before < taken / 10
    assert last.sum() == last.numel()


def test_ranks_with_different_free_memory_hold_and_drop_the_same_models():
    def rank(number: int) -> Any:
        held = holder(host_reserve=(1 << 60) * number)  # rank 1 has no memory on the host
        limit = Allowance(limit=(3 + 2 * number) * ROW)  # rank 0 has no memory for both models
        held.hold(A, "whole", lambda: Rows(2), limit)
        held.hold(B, "whole", lambda: Rows(2), limit)
        before = on_device(held), on_host(held)
        held.release(B)
        return before, on_device(held), on_host(held)

    first, second = run_ranks(2, rank)
    assert first == second == (({"b": 2}, {}), {}, {})


def test_a_release_of_one_device_frees_only_its_rank():
    def rank(number: int) -> Any:
        held = holder()
        part = held.hold(A, "whole", lambda: Rows(2), PLENTY)
        held.release(A, here=number == 0)
        away = on_device(held), on_host(held)
        held.hold(B, "whole", lambda: Rows(2), Allowance(limit=3 * ROW))  # A then leaves rank 1 too
        between = on_device(held), on_host(held)
        assert held.hold(A, "whole", pytest.fail, PLENTY) is part
        return away, between, on_device(held), held.restored // ROW, part.fills

    first, second = run_ranks(2, rank)
    assert (first[0], second[0]) == (({}, {"a": 2}), ({"a": 2}, {}))
    assert first[1:] == second[1:] == (({"b": 2}, {"a": 2}), {"b": 2, "a": 2}, 2, 1)


def all_ranks() -> Communicator:
    return Communicator("subgroup", dist.group.WORLD, CPU, False, Meter())


def test_ranks_with_equal_weights_keep_one_copy_in_whatever_order_they_leave():
    def rank(number: int) -> Any:
        held, limit = holder(), Allowance(limit=3 * ROW)
        part = held.hold(A, "whole", lambda: Rows(2, value=0.1, sharers=all_ranks()), PLENTY)
        part.module.weight.data.view(-1).copy_(torch.arange(2 * ROWS * ROWS) / 3)
        before = part.module.weight.clone()
        held.release(A, here=number == 2)
        first = held.on_device()[A] if number < 2 else 0, held.on_host()[A]
        held.release(A)
        counted = held.on_host()[A]
        here = torch.equal(part.module.weight, before), mappings()
        held.hold(B, "whole", lambda: Rows(2), limit)
        assert held.hold(A, "whole", pytest.fail, limit) is part
        back = torch.equal(part.module.weight, before), mappings()
        part.module.weight.data.fill_(number)  # each rank again has weights of its own
        all_true(True)
        return first, counted, here, back, part.module.weight.mean().item(), on_host(held)

    share = -(-2 * ROW // 3)
    for number, found in enumerate(run_ranks(3, rank)):
        device = 0 if number == 2 else 2 * ROW
        assert found == ((device, share), share, (True, 1), (True, 0), number, {"b": 2})


class Room(RankMemory):
    """A rank memory with `room` bytes on the host, of which released weights use some."""

    held: ModelHolder
    room = 1 << 40

    def has_host_room(self, nbytes: int) -> bool:
        return nbytes + sum(self.held.on_host().values()) <= self.room


def test_the_memory_of_a_host_copy_is_kept_until_other_weights_need_it():
    def rank(number: int) -> Any:
        memory = Room(CPU, 1)
        memory.held = held = ModelHolder(memory, all_true, RankProgress())

        def build() -> Rows:
            rows = Rows(2, sharers=all_ranks())
            rows.store = Keeping(rows.module, all_ranks())
            return rows

        held.hold(A, "whole", build, PLENTY)
        held.hold(B, "whole", lambda: Rows(2), PLENTY)
        held.release(A)
        away = on_host(held)
        held.hold(A, "whole", pytest.fail, PLENTY)
        kept = on_host(held), mappings()
        held.release(A)
        again = on_host(held), mappings()
        held.hold(A, "whole", pytest.fail, PLENTY)
        memory.room = 2 * ROW
        held.hold(B, "whole", pytest.fail, PLENTY)
        enough = on_host(held), mappings()  # besides it, as much memory again is free
        held.release(B)
        wanted = on_host(held), mappings()
        held.hold(B, "whole", pytest.fail, PLENTY)
        memory.room = 1 << 40
        held.release(A)
        memory.room = 2 * ROW - 1
        held.hold(A, "whole", pytest.fail, PLENTY)
        return away, kept, again, enough, wanted, (on_host(held), mappings())

    half = ({"a": 1}, 1)  # this rank's half of the ranks' one copy
    assert run_ranks(2, rank) == [({"a": 1}, half, half, half, ({"b": 2}, 0), ({}, 0))] * 2


def mappings() -> int:
    """Return the number of copies of weights that this process maps."""
    return Path("/proc/self/maps").read_text().count("memfd:parallel weights")


def test_sharded_weights_count_as_shards_and_return_bit_equal():
    def rank(number: int) -> Any:
        held = holder()
        part = held.hold(A, "sharded", lambda: Rows(2, value=0.1, sharded=True), PLENTY)
        x = torch.arange(ROWS, dtype=torch.float32)
        with torch.no_grad():
            with part.sharded.forward(), part.sharded.block(0):
                before, sizes = part.module(x), on_device(held)
            held.release(A)
            assert held.hold(A, "sharded", pytest.fail, PLENTY) is part
            with part.sharded.forward(), part.sharded.block(0):
                return sizes["a"], torch.equal(before, part.module(x)), part.fills

    assert run_ranks(2, rank) == [(1, True, 1)] * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_released_part_gives_its_memory_back_and_returns_bit_equal():
    device = torch.device("cuda", 0)
    held = ModelHolder(RankMemory(device, 1, 0), bool, RankProgress())

    class OnGpu(Rows):
        def fill(self) -> None:
            self.store.materialise(device)
            nn.init.uniform_(self.module.weight)

    part = held.hold(A, "whole", lambda: OnGpu(1 << 16), PLENTY)
    weight = part.module.weight.clone()
    before = torch.cuda.memory_allocated(device)
    held.release(A)
    assert torch.cuda.memory_allocated(device) <= before - (ROW << 16)
    held.hold(A, "whole", pytest.fail, PLENTY)
    assert torch.equal(part.module.weight, weight)
