"""Advice on a plan whose worker ran out of memory."""

from __future__ import annotations

import msgspec

from parallel_backend.plan import ParallelPlan
from parallel_backend.plan.advice import memory_advice
from parallel_backend.plan.resolve import in_rows
from tests.support.plans import cpu_plan


def test_advice_for_a_vae_names_no_sharded_weights_and_the_release_of_other_models() -> None:
    plan = in_rows(ParallelPlan(), ("cuda:0", "cuda:1"))
    advice = memory_advice(plan, part=400_000_000, other_models=0, missing=1)
    assert advice.startswith("use more devices, a smaller picture or fewer frames, or tiles, which are approximate")
    released = memory_advice(plan, 400_000_000, 9_000_000_000, 10**9)
    assert "so that the workers release other models (9.00 GB)" in released


def test_the_first_plan_that_fits_is_advised() -> None:
    """Workers on one GPU cannot shard weights; streamed weights come last."""
    plan, alone = cpu_plan(ulysses=2), cpu_plan(blocks=10)
    assert memory_advice(plan, 400_000_000, 0, 10**8).startswith("use weights sharded")
    shared = msgspec.structs.replace(plan, devices=("cuda:0", "cuda:0"))
    assert memory_advice(shared, 400_000_000, 0, 10**8).startswith("use pipefusion 2 in")
    assert memory_advice(alone, 400_000_000, 0, 10**8).startswith(
        "use weights streamed in Parallel Plan, which needs about 80 MB of weights on each worker instead of 400 MB"
    )
    tight = cpu_plan(ulysses=2, blocks=10)
    assert memory_advice(tight, 400_000_000, 0, 300_000_000).startswith("use weights streamed")
    streamed = cpu_plan(blocks=10, weights="streamed")
    assert memory_advice(streamed, 80_000_000, 0, 10**7).startswith("use more devices, an fp8 weight_dtype")
