"""The proof of one call of a small model: run on one rank, and divided over two or three ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ....plan import ResolvedPlan
from ..small.case import Case
from .pairs import Pair, rows_of_a_batch, two_prompts
from .rank import ProofRank, errors_of, plan_for, worst
from .ranks import run_in_turn

RANKS = 3
TOLERANCE = 1e-5
"""Largest allowed relative L2 error in fp32.

The limit applies to the whole call, and to each patch computed from a cache that holds the same call, so that nothing is stale.
"""

OnRank = Callable[[int], list[Tensor]]


@dataclass(frozen=True)
class Split:
    """One way to parallelise a call: its plan, the computation of each rank, and the output of the unsharded model.

    With `rows`, each rank computes only its own row of the expected output.
    """

    plan: ResolvedPlan
    on_rank: OnRank
    expected: Tensor
    rows: bool = False

    def work(self, rank: int) -> bytes:
        """Return the errors of one rank."""
        return errors_of(self.on_rank(rank), self.expected[rank : rank + 1] if self.rows else self.expected)


@torch.no_grad()
def prove(case: Case) -> Mapping[str, float]:
    """Return the largest relative error under each split, by the split's name in a plan.

    Raises:
        RankFailed: a rank could not compute its part.
    """
    splits = dict(_splits(case))
    answers = run_in_turn([(split.plan.world_size, split.work) for split in splits.values()])
    return {name: worst(of_ranks) for name, of_ranks in zip(splits, answers, strict=True)}


def _splits(case: Case) -> Iterator[tuple[str, Split]]:
    expected = case.stock()
    degrees = [{"ulysses": 2}, {"ring": RANKS}]
    if not case.declaration.whole_picture:
        # a video packed with its sound passes through the stages as one patch
        degrees.append({"pipefusion": RANKS, "patches": 2 if len(case.shapes) < 2 else 1})
    for fields in degrees:
        plan = plan_for(case, **fields)
        yield (
            ", ".join(f"{axis} {degree}" for axis, degree in fields.items()),
            Split(plan, _divided(case, plan), expected),
        )
    if case.declaration.no_batches:
        return
    for axis, pair in (("data", rows_of_a_batch(case)), ("cfg", two_prompts(case))):
        try:
            together = pair.together.stock()
        except (RuntimeError, ValueError):  # ComfyUI's own class accepts no batch of this call
            continue
        plan = plan_for(case, **{axis: 2})
        yield f"{axis} 2", Split(plan, _apart(pair, plan), together, rows=True)


def _divided(case: Case, plan: ResolvedPlan) -> OnRank:
    def on_rank(_: int) -> list[Tensor]:
        rank = ProofRank(case, plan)
        return [out for out in (rank.run(), rank.by_patch()) if out is not None]

    return on_rank


def _apart(pair: Pair, plan: ResolvedPlan) -> OnRank:
    def on_rank(rank: int) -> list[Tensor]:
        out = ProofRank(pair.apart[rank], plan).run()
        return [] if out is None else [out]

    return on_rank
