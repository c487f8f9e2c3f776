"""Bytes that ranks of each family send, hold and cache, against counts by hand and the formulas of plans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

from parallel_backend.models.comfyui.plan_shape import plan_shape
from parallel_backend.models.comfyui.proof.rank import ProofRank, plan_for
from parallel_backend.models.comfyui.small import Case, small
from parallel_backend.models.comfyui.small.case import HEADS, WIDTH
from parallel_backend.models.sequence_parallel.blocks import blocks_of
from parallel_backend.plan import ModelShape
from parallel_backend.plan.predict.memory import needs
from parallel_backend.plan.predict.profiles import DenoiseJob
from tests.support.ranks import run_ranks
from tests.support.selection import thorough
from tests.support.sent_bytes import ring_bytes, ulysses_bytes

ELEMENT = 4


class Count(NamedTuple):
    """Hand-counted sizes of a model: the tokens of text and picture that attend to each other in each block, and block names.

    `kv_heads` are the model's heads of keys and values, then the number of them that each of two Ulysses ranks needs.
    """

    attended: tuple[tuple[int, int], ...]
    hidden: int
    blocks: tuple[str, ...]
    head: tuple[str, ...]
    heads: int = HEADS
    kv_heads: tuple[int, int, int] = (HEADS, HEADS // 2, HEADS - HEADS // 2)

    @property
    def tokens(self) -> int:
        """Return the number of tokens of the largest sequence."""
        return max(map(sum, self.attended))


FLUX_HEAD, FLUX_BLOCKS = ("final_layer.",), ("double_blocks.0.", "single_blocks.0.", "single_blocks.1.")
COUNTS: Mapping[str, Count] = {
    "flux 2, zero-timestep reference": Count(((512, 7 * 5 + 4 * 5),) * 3, WIDTH, FLUX_BLOCKS, FLUX_HEAD),
    "wan, text": Count(((0, 3 * 4 * 5),) * 3, WIDTH, tuple(f"blocks.{n}." for n in range(3)), ("head.",)),
    "z-image": Count(  # text and picture are padded to multiples of 32, in one stream; the refiners see only the picture
        ((0, 64), (0, 64), (0, 32 + 64), (0, 32 + 64)),
        3 * WIDTH,
        (*(f"noise_refiner.{n}." for n in range(2)), *(f"layers.{n}." for n in range(2))),
        FLUX_HEAD,
    ),
    "krea 2": Count(  # three query heads share one head of keys, so that each rank has a group
        ((7, 5 * 7),) * 3, 2 * WIDTH, tuple(f"blocks.{n}." for n in range(3)), ("last.",), 6, (2, 1, 1)
    ),
    "omnigen 2": Count(  # two query heads share one head of keys, so that one group lies on both ranks
        ((0, 5 * 7),) * 2 + ((7, 5 * 7),) * 2,
        2 * WIDTH,
        (*(f"noise_refiner.{n}." for n in range(2)), *(f"layers.{n}." for n in range(2))),
        ("norm_out.",),
        6,
        (3, 2, 2),
    ),
}
QUICK = ("flux 2, zero-timestep reference", "z-image")
"""Models of the quick run: two streams that become one, and refiners of the picture alone before one stream. Shared heads of keys
are also in attention/test_sequence_parallel.
"""


@pytest.fixture(scope="module", params=[pytest.param(name, marks=[thorough] * (name not in QUICK)) for name in COUNTS])
def family(request: Any) -> tuple[Case, Count]:
    """Return a small model and its hand-counted sizes."""
    return small(request.param), COUNTS[request.param]


def shape_of(case: Case) -> ModelShape:
    blocks = blocks_of(case.model, case.declaration)
    return plan_shape(case.kind, case.model, case.declaration, blocks, case.x.shape[1], case.x.ndim - 2)


def share(of: int, ranks: int, rank: int) -> int:
    """Return a rank's share of a count that is divided as evenly as possible."""
    return of * (rank + 1) // ranks - of * rank // ranks


def test_ulysses_and_ring_send_exactly_the_counted_bytes(family: tuple[Case, Count]) -> None:
    """Each rank sends the bytes counted by hand, for uneven tokens and heads. The mean is within 5 % of the even formulas.

    Heads of keys and values that query heads share are sent once to each rank that needs them.
    """
    case, count = family
    plan = plan_for(case, ring=2, ulysses=2)
    head_dim = count.hidden // count.heads
    kv_heads, *each = count.kv_heads

    def sent(_: int) -> dict[str, int]:
        rank = ProofRank(case, plan)
        rank.run()
        return dict(rank.meter.sent)

    found = run_ranks(4, sent)
    for number, one in enumerate(found):
        ring_rank, ulysses_rank = divmod(number, 2)
        heads = share(count.heads, 2, ulysses_rank)
        ulysses = ring = 0
        for streams in count.attended:
            local = sum(share(stream, 4, number) for stream in streams)
            group = sum(share(stream, 4, 2 * ring_rank + other) for stream in streams for other in range(2))
            ulysses += local * (count.heads - heads + 2 * each[1 - ulysses_rank]) + (group - local) * heads
            ring += 2 * group * each[ulysses_rank]
        assert one["ulysses"] == ulysses * head_dim * ELEMENT
        assert one["ring"] == ring * head_dim * ELEMENT
    shape = shape_of(case)
    assert (shape.kv_heads or shape.heads) == kv_heads
    tokens = sum(map(sum, count.attended)) / shape.blocks
    for axis, formula in (("ulysses", ulysses_bytes), ("ring", ring_bytes)):
        even = formula(tokens, shape.hidden, shape.blocks, ELEMENT, ring=2, ulysses=2, group=shape.heads / sum(each))
        assert sum(one[axis] for one in found) / 4 == pytest.approx(even, rel=0.05)


def test_a_stages_weights_and_cache_have_the_bytes_of_the_formulas(family: tuple[Case, Count]) -> None:
    """A stage holds its blocks and the parameters outside of blocks. Its cache has keys and values of all tokens, split by
    heads.
    """
    case, count = family
    plan = plan_for(case, pipefusion=2, ulysses=2, patches=2)
    head_dim = count.hidden // count.heads

    def held(_: int) -> tuple[int, int]:
        rank = ProofRank(case, plan)
        rank.run()
        return sum(parameter.nbytes for parameter in rank.module.parameters()), rank.forward.cache_bytes

    found = run_ranks(4, held)
    every = {name: parameter.nbytes for name, parameter in case.model.named_parameters()}
    outside = sum(size for name, size in every.items() if not name.startswith(count.blocks + count.head))
    job = DenoiseJob(count.tokens, 0, element=ELEMENT, weight_element=ELEMENT)
    formula = needs(plan, shape_of(case), job)
    start = 0
    for stage, blocks in enumerate(plan.stages):
        mine = range(start, start + blocks)
        start += blocks
        weights = outside + sum(
            size for name, size in every.items() if name.startswith(tuple(count.blocks[n] for n in mine))
        )
        weights += sum(size for name, size in every.items() if name.startswith(count.head)) if stage else 0
        rows = sum(2 * sum(count.attended[n]) for n in mine) * head_dim * ELEMENT
        for ulysses_rank in range(2):
            assert found[2 * stage + ulysses_rank] == (weights, rows * count.kv_heads[1 + ulysses_rank])
        assert weights <= formula.weights
    kept = max(cache for _, cache in found)
    without = needs(plan_for(case, pipefusion=2, ulysses=2, patches=1), shape_of(case), job)
    assert kept <= formula.activations - without.activations
