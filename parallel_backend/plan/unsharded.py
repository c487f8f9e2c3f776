"""Plans of unsharded models: each rank computes a whole forward, for its branch and its part of the batch."""

from __future__ import annotations

from ..errors import PlanRefused
from ..mesh_axes import MeshAxis
from .plan import ParallelPlan, Workload

SPLITTING = (MeshAxis.PIPEFUSION, MeshAxis.ULYSSES, MeshAxis.RING, "patches")
"""The degrees that split a forward and so must be 1."""

SPLIT = "this model is split by prompts and batches only"

ONE_PICTURE = f"{SPLIT}: with a batch of 1 it uses two GPUs at most"

WORDS = ("no GPU", "one GPU", "two GPUs")


def refuse_unsharded(plan: ParallelPlan, workers: int, workload: Workload) -> None:
    """Refuse a plan that would split a forward, or that has more workers than an unsharded model can use.

    Args:
        plan: the requested plan.
        workers: the number of the plan's devices.
        workload: the job's limits.

    Raises:
        Refused: the message has the largest number of workers that the job has work for.
    """
    for name in SPLITTING:
        if getattr(plan, name) > 1:
            raise PlanRefused(
                f"{name} {getattr(plan, name)} cannot be used, because {ONE_PICTURE}; use {name} 1, and cfg or data."
            )
    if plan.stages:
        raise PlanRefused(f"stages {plan.stages!r} cannot be used, because {ONE_PICTURE}; leave it empty.")
    if plan.weights != "replicated":
        raise PlanRefused(
            f"weights {plan.weights} cannot be used with this model, because each GPU runs the whole model: use weights "
            "replicated, or smaller weights (fp8, GGUF)."
        )
    if plan.attention != "auto":
        raise PlanRefused(
            f"attention {plan.attention} cannot be used with this model, which runs with ComfyUI's own attention: use attention "
            "auto."
        )
    if not _splits(plan, workers, workload):
        most = _most(plan, workload)
        fewer = max((count for count in range(1, workers) if _splits(plan, count, workload)), default=0)
        if not fewer:
            raise PlanRefused(
                f"data {max(1, plan.data)} x cfg {max(1, plan.cfg)} needs {max(1, plan.data) * max(1, plan.cfg)} workers or a "
                f"multiple of that, but devices {plan.devices!r} has {workers}: use data 0 and cfg 0 (automatic), or more "
                "devices."
            )
        way_out = f"{fewer} device{'s' * (fewer > 1)}" + ("" if plan.data else ", or a larger batch")
        raise PlanRefused(
            f"devices {plan.devices!r} has {workers} workers, but {SPLIT}: {_job(plan, workload)} it uses {_gpus(most)} at most; "
            f"use {way_out}."
        )


def usable(plan: ParallelPlan, workers: int, workload: Workload) -> int:
    """Return the largest number of workers, among automatic devices, that all have work; `workers` if there is none."""
    return next((count for count in range(workers, 0, -1) if _splits(plan, count, workload)), workers)


def _splits(plan: ParallelPlan, workers: int, workload: Workload) -> bool:
    """Return True if some degrees give each of this number of workers some work."""
    degrees = [plan.cfg] if plan.cfg else [1, 2] if workload.has_uncond else [1]
    parts = [workers // cfg for cfg in degrees if workers % cfg == 0]
    return any(data <= workload.batch and plan.data in (0, data) for data in parts)


def _most(plan: ParallelPlan, workload: Workload) -> int:
    return (plan.data or workload.batch) * (plan.cfg or (2 if workload.has_uncond else 1))


def _job(plan: ParallelPlan, workload: Workload) -> str:
    """Return the job's limits to the number of workers, in words."""
    batch = f"data {plan.data}" if plan.data else f"a batch of {workload.batch}"
    if plan.cfg:
        return f"with {batch} and cfg {plan.cfg}"
    return f"with {batch}" + ("" if workload.has_uncond else " and no negative prompt")


def _gpus(number: int) -> str:
    return WORDS[number] if number < len(WORDS) else f"{number} GPUs"
