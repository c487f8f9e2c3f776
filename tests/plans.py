"""Plans on the CPU for tests."""

from __future__ import annotations

from itertools import pairwise

from parallel_backend.plan import ResolvedPlan


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
) -> ResolvedPlan:
    """A plan that can run, with as many CPU workers as its degrees need."""
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
    )
