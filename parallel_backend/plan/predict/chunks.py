"""In how many chunks Ulysses exchanges the heads, each behind the attention of another."""

from __future__ import annotations

import msgspec

from ...layout import SequenceSplit
from ..plan import ResolvedPlan
from .cost import DenoiseJob, StepCost, cost
from .profiles import ModelShape, Profile

MOST = 4
"""Chunks; with so many three quarters of the exchange hide, and each has a start of its own."""

PAYS = 0.99
"""Part of a step's time below which a prediction is believed."""


def in_chunks(
    plan: ResolvedPlan, model: ModelShape, job: DenoiseJob, profile: Profile
) -> tuple[ResolvedPlan, StepCost]:
    """Return the plan with the number of head chunks that is predicted to be fastest, and its cost.

    One, where it is little faster with more, and under Ring, whose hops hide behind the same attention and would each come
    once a chunk; patches find all heads of their keys kept together.
    """
    whole = msgspec.structs.replace(plan, head_chunks=1)
    alone = cost(whole, model, job, profile)
    if model.unsharded or plan.ulysses == 1 or plan.ring > 1 or plan.patches > 1 or not profile.software.chunk:
        return whole, alone
    split = SequenceSplit.of((0,), model.heads, plan.ring, plan.ulysses, plan.shares, model.kv_heads)
    fastest = whole, alone
    for chunks in range(2, min(MOST, *split.kv_counts()) + 1):
        cut = msgspec.structs.replace(plan, head_chunks=chunks)
        prediction = cost(cut, model, job, profile)
        if prediction.seconds < min(fastest[1].seconds, PAYS * alone.seconds):
            fastest = cut, prediction
    return fastest
