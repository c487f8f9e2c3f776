"""Jobs and plans for tests of the cost model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from parallel_backend.diffusion import ModelSpec
from parallel_backend.host.planning.planner import PlanRequest
from parallel_backend.plan import ModelLimits, ParallelPlan, ResolvedPlan, Workload, candidates
from parallel_backend.plan.predict.known_models import known_model
from parallel_backend.plan.predict.profiles import DenoiseJob, Profile

FLUX = known_model("flux-dev").shape
JOB = DenoiseJob(image_tokens=4096, text_tokens=512)
TOTAL = 25.3e9
"""Bytes of a card of 24 GB."""


def question(job: DenoiseJob = JOB, **requested_plan: Any) -> PlanRequest:
    """Return a request for a plan of FLUX.1 on a machine with two GPUs."""
    spec = ModelSpec("comfyui", "flux.safetensors", 1, 2, "bfloat16")
    return PlanRequest(ParallelPlan(**requested_plan), 2, spec, FLUX, Workload(job.batch, job.has_uncond, 64), job)


def plans(devices: int, has_uncond: bool = False, **requested_plan: Any) -> list[ResolvedPlan]:
    limits = ModelLimits(FLUX.heads, FLUX.head_dim, FLUX.blocks)
    return candidates(ParallelPlan(**{"pipefusion": 0, **requested_plan}), devices, limits, Workload(1, has_uncond, 64))


def plan(**degrees: int | str) -> ResolvedPlan:
    numbers = [degree for degree in degrees.values() if isinstance(degree, int)]
    ones = {"data": 1, "cfg": 1, "pipefusion": 1, "ring": 1, "ulysses": 1}
    (found,) = plans(math.prod(numbers), degrees.get("cfg") == 2, **{**ones, **degrees})
    return found


def with_memory(base: Profile, memory: float) -> Profile:
    return replace(base, device=replace(base.device, memory=memory))
