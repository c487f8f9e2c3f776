"""Weights off their devices: one copy for ranks that hold the same bits, and a separate copy for ranks that differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel_backend.weights.stores import host_copy
from parallel_backend.weights.stores.host_copy import WORDS, digest, shared_bytes
from parallel_backend.weights.stores.replicated import ReplicatedStore
from tests.support.rank_parts import CPU, everyone
from tests.support.ranks import run_ranks
from tests.weights.tiny import Keeping, bits, tiny


def model() -> nn.Module:
    """Return a model with tensors of every kind, with another memory order, and without memory of their own."""
    module = tiny("cpu")
    module.register_parameter("turned", nn.Parameter(torch.arange(35.0).view(5, 7).T))
    module.register_buffer("repeated", torch.tensor([[1.0], [2.0]]).expand(2, 3))
    module.register_buffer("number", torch.tensor(7))
    module.register_buffer("nothing", torch.empty(0, 3))
    for block in module.blocks:
        block.register_buffer("number", module.number)
        block.whole = module.blocks[0].whole
    return module


def tensors(module: nn.Module) -> dict[str, Tensor]:
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach() for name, tensor in named}


def expect_the_same(module: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, tensor in tensors(module).items():
        assert torch.equal(bits(tensor), bits(expected[name])), name
        assert tensor.shape == expected[name].shape
        assert name == "repeated" or tensor.stride() == expected[name].stride(), name
    assert module.blocks[1].whole is module.blocks[0].whole
    assert module.blocks[1].number is module.number


@pytest.mark.parametrize("unlike", [False, True])
def test_weights_of_every_kind_leave_into_one_copy_and_return_with_the_same_bits(unlike: bool) -> None:
    def rank(number: int) -> Any:
        module = model()
        if unlike:
            module.blocks[4].exact.data[10].add_(number * 1e-16)  # the last element of the last block
        expected = {name: tensor.clone() for name, tensor in tensors(module).items()}
        whole = ReplicatedStore(module, everyone("subgroup"))
        taken = []
        for leavers in ({0, 1, 2}, {1}, {0, 2}):
            taken.append(whole.leaving(number in leavers))
            whole.leave(number in leavers)
            dist.barrier()
            if leavers == {0, 1, 2} and number == 1:
                module.turned.data.add_(1)  # all ranks see the change if there is one copy
            dist.barrier()
            seen = torch.equal(module.turned, expected["turned"] + 1)
            dist.barrier()
            if leavers == {0, 1, 2} and number == 1:
                module.turned.data.sub_(1)
            dist.barrier()
            taken.append(seen)
            expect_the_same(module, expected)
            if leavers != {1}:
                whole.come_back()
                whole.stay()
                dist.barrier()
                module.blocks[number].weight.data.zero_()  # each rank again has weights of its own
                dist.barrier()
                assert all(module.blocks[other].weight.data.any() for other in range(3) if other != number)
                module.blocks[number].weight.data.copy_(expected[f"blocks.{number}.weight"])
                expect_the_same(module, expected)
        return taken, whole.nbytes

    for number, (taken, nbytes) in enumerate(run_ranks(3, rank)):
        part = nbytes if unlike else -(-nbytes // 3)
        some, rest = (nbytes * (number == 1), nbytes * (number != 1)) if unlike else (part, 0)
        assert taken == [part, not unlike or number == 1, some, False, rest, False]


def test_kept_memory_receives_the_current_weights_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(number: int) -> Any:
        taken: list[int] = []

        def shared(nbytes: int, *rest: Any) -> Tensor:
            taken.append(nbytes)
            return shared_bytes(nbytes, *rest)

        monkeypatch.setattr(host_copy, "shared_bytes", shared)
        module = model()
        whole = Keeping(module, everyone("subgroup"))
        counts = []
        for unlike in (False, False, True, False):
            for block in module.blocks:
                block.weight.data.add_(1)  # adapters change weights so
            module.blocks[2].weight.data[0, 0] = number if unlike else 7
            expected = {name: tensor.clone() for name, tensor in tensors(module).items()}
            here = number == 0 or not unlike
            whole.leaving(here)
            whole.leave(here)
            expect_the_same(module, expected)
            whole.come_back()
            whole.stay()
            expect_the_same(module, expected)
            dist.barrier()
            counts.append(len(taken))
        whole.give_up()
        return counts

    assert run_ranks(2, rank) == [[1, 1, 1, 2]] * 2  # weights that differ stay in place, as this is host memory


def test_a_digest_depends_on_bits_order_shapes_and_dtypes() -> None:
    base = torch.arange(8 * WORDS + 5, dtype=torch.float64).view(torch.uint8)[:-3]
    last, swapped = base.clone(), base.clone()
    last[-1] ^= 1
    swapped[:8], swapped[8:16] = base[8:16], base[:8]
    cases = [[base], [last], [swapped], [base[:-1]], [base[None]], [base.view(torch.int8)], [base, base]]
    cases += [[base[:16], base[16:32]], [base[16:32], base[:16]]]
    found = [digest(case, CPU) for case in cases]
    assert len(set(found)) == len(cases)
    assert found == [digest(case, CPU) for case in cases]
    assert digest([base[3:]], CPU) == digest([base[3:].clone()], CPU)  # the digest does not depend on the address
