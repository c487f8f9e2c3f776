"""What to change in a plan whose worker ran out of memory."""

from __future__ import annotations

from parallel_backend.plan import ParallelPlan
from parallel_backend.plan.resolve import in_rows
from parallel_backend.plan.roomier import roomier


def test_a_vae_is_not_sharded() -> None:
    plan = in_rows(ParallelPlan(), ("cuda:0", "cuda:1"))
    advice = roomier(plan, part=400_000_000, others=0, missing=1)
    assert advice.startswith("use more devices, a smaller picture or fewer frames, or tiles, which are approximate")


def test_other_models_make_way_first() -> None:
    plan = in_rows(ParallelPlan(), ("cuda:0", "cuda:1"))
    assert "so that other models make way (9.00 GB of them)" in roomier(plan, 400_000_000, 9_000_000_000, 10**9)
