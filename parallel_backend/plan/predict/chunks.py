"""The number of chunks in which Ulysses exchanges heads, so that a chunk's exchange overlaps with another chunk's attention."""

from __future__ import annotations

import msgspec

from ...layout import SequenceSplit
from ..plan import ResolvedPlan
from .cost import StepCost, cost
from .profiles import DenoiseJob, ModelShape, Profile

MOST = 4
"""The largest number of chunks. With four, attention hides three quarters of the exchange; each chunk adds its own latency."""

PAYS = 0.99
"""Chunks are used if the predicted step takes less than this fraction of the step without chunks."""


def in_chunks(
    plan: ResolvedPlan, model: ModelShape, job: DenoiseJob, profile: Profile
) -> tuple[ResolvedPlan, StepCost]:
    """Return the plan with the number of head chunks that is predicted to be fastest, and its cost.

    The number is 1 if more chunks gain too little. Under Ring it is 1, because hops overlap with the same attention and would
    come once per chunk. With patches it is 1, because their cached keys of all heads lie together.
    """
    whole = msgspec.structs.replace(plan, head_chunks=1)
    alone = cost(whole, model, job, profile)
    if model.unsharded or plan.ulysses == 1 or plan.ring > 1 or plan.patches > 1:
        return whole, alone
    split = SequenceSplit.of((0,), model.heads, plan.ring, plan.ulysses, plan.shares, model.kv_heads)
    fastest = whole, alone
    for chunks in range(2, min(MOST, *split.kv_counts()) + 1):
        cut = msgspec.structs.replace(plan, head_chunks=chunks)
        prediction = cost(cut, model, job, profile)
        if prediction.seconds < min(fastest[1].seconds, PAYS * alone.seconds):
            fastest = cut, prediction
    return fastest
