"""Advice for a plan whose worker ran out of memory."""

from __future__ import annotations

from .plan import ResolvedPlan, share_a_gpu


def memory_advice(plan: ResolvedPlan, part: int, other_models: int, missing: int) -> str:
    """Return advice in words: the mildest change to the plan that frees `missing` bytes on a worker.

    Args:
        plan: the plan that ran out of memory.
        part: bytes of weights that the job's model takes, or would take, on the worker.
        other_models: bytes of weights of other models on the worker.
        missing: bytes that the allocation lacked.
    """
    if other_models >= max(missing, 1):
        sharers = max(plan.devices.count(device) for device in plan.devices)
        limit = -(-part * sharers // 10**8) / 10
        return (
            f"set memory_limit to {limit} in Parallel Plan, so that the workers release other models "
            f"({gigabytes(other_models)})"
        )
    if not plan.stages:
        return (
            "use more devices, a smaller picture or fewer frames, or tiles, which are approximate (VAE Decode (Tiled), VAE "
            "Encode (Tiled), approximate_tiles of CogVideoX Parallel Decode)"
        )
    ranks, stages = plan.world_size, plan.pipefusion
    if plan.weights == "replicated":
        if stages == 1 and ranks > 1 and not share_a_gpu(plan.devices) and part - part // ranks >= missing:
            return _instead("weights sharded", part // ranks, part)
        for degree in (stages * factor for factor in (2, 4, 8, 16, 32)):
            if degree <= sum(plan.stages) and not ranks % degree and part - part * stages // degree >= missing:
                return _instead(f"pipefusion {degree}", part * stages // degree, part)
    window = -(-2 * part // max(plan.stages))  # blocks may differ in size
    if plan.weights != "streamed" and part - window >= missing:
        return _instead("weights streamed", window, part, "about ")
    return "use more devices, an fp8 weight_dtype, a smaller picture or a smaller batch"


def _instead(change: str, after: int, before: int, about: str = "") -> str:
    """Return the advice for a change, with the bytes of weights on a worker after and before the change."""
    return (
        f"use {change} in Parallel Plan, which needs {about}{gigabytes(after)} of weights on each worker instead of "
        f"{gigabytes(before)}"
    )


def gigabytes(count: float) -> str:
    """Return bytes as text, such as `1.25 GB`, or `37 MB` for small amounts."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"
