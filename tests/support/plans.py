"""Plans on the CPU and a measured machine, for tests."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec

from parallel_backend.plan import ResolvedPlan
from parallel_backend.plan.predict.measure import Machine

MEASURED = Machine(
    matmul=4e14,
    attention=4e14,
    bandwidth=2e12,
    launch=3e-6,
    ranks=2,
    link_bandwidth=2e10,
    link_latency=2e-5,
    connection=3e8,
    host_bandwidth=2e10,
    kinds=("NVIDIA H100",) * 2,
)
"""Measurements of a machine with two H100 and P2P."""


def cpu_plan(
    *,
    data: int = 1,
    cfg: int = 1,
    pipefusion: int = 1,
    ring: int = 1,
    ulysses: int = 1,
    patches: int = 0,
    warmup_steps: int = 1,
    blocks: int = 3,
    weights: str = "replicated",
    memory_limit: float = 0.0,
    shares: tuple[int, ...] = (),
    head_chunks: int = 1,
    exchange: str = "exact",
) -> ResolvedPlan:
    """Return a plan that can run, with as many CPU workers as its degrees need."""
    ends = [blocks * stage // pipefusion for stage in range(pipefusion + 1)]
    return ResolvedPlan(
        devices=("cpu",) * (data * cfg * pipefusion * ring * ulysses),
        data=data,
        cfg=cfg,
        pipefusion=pipefusion,
        ring=ring,
        ulysses=ulysses,
        patches=patches or pipefusion,
        warmup_steps=warmup_steps,
        stages=tuple(stop - start for start, stop in pairwise(ends)),
        weights=weights,
        attention="auto",
        memory_limit=memory_limit,
        shares=shares or (1,) * (ring * ulysses),
        head_chunks=head_chunks,
        exchange=exchange,
    )


def gpu_plan(**settings: Any) -> ResolvedPlan:
    """Return the plan of `cpu_plan` on as many GPUs."""
    plan = cpu_plan(**settings)
    return msgspec.structs.replace(plan, devices=tuple(f"cuda:{rank}" for rank in range(plan.world_size)))
