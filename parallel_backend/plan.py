"""ParallelPlan: what the user asks for, its one validation, and the automatic choice of degrees."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from .errors import Refused

AXES = ("ring", "ulysses")
"""Mesh axes from outermost (slowest links) to innermost (fastest links)."""

MAX_WORLD_SIZE = 64


class ParallelPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A wish for how to spread one denoise; a degree of 0 means "choose for me".

    `devices` is "auto" (every visible GPU), a list of GPU indices ("0,1"; "0,0" puts two workers on one GPU)
    or "cpu:N" for N workers on the CPU.
    """

    devices: str = "auto"
    ulysses: int = 0
    ring: int = 0
    attention: str = "auto"


class ResolvedPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan that can run: one device a rank, every degree at least 1, their product the world size."""

    devices: tuple[str, ...]
    ring: int
    ulysses: int
    attention: str

    @property
    def world_size(self) -> int:
        """Workers."""
        return len(self.devices)

    @property
    def transport(self) -> str:
        """ "nccl" with one GPU a rank; "gloo" on CPUs and when ranks share a GPU (staged through host memory)."""
        on_gpu = all(device.startswith("cuda") for device in self.devices)
        return "nccl" if on_gpu and len(set(self.devices)) == len(self.devices) else "gloo"

    def describe(self) -> str:
        """Short text for logs, such as `4 workers (cuda:0 … cuda:3): ring 2 x ulysses 2`."""
        first, last = self.devices[0], self.devices[-1]
        where = first if first == last else f"{first} … {last}"
        workers = "1 worker" if self.world_size == 1 else f"{self.world_size} workers"
        return f"{workers} ({where}): ring {self.ring} x ulysses {self.ulysses}"


@dataclass(frozen=True)
class ModelLimits:
    """What a model's shape allows a plan to be."""

    heads: int
    head_dim: int


def resolve(plan: ParallelPlan, gpus: int, limits: ModelLimits) -> ResolvedPlan:
    """The plan with every choice made, for a machine that shows `gpus` GPUs.

    Raises:
        Refused: the plan cannot work; the sentence names one that does.
    """
    for axis in AXES:
        if getattr(plan, axis) < 0:
            raise Refused(f"{axis} {getattr(plan, axis)} is no degree: use 0 for automatic, or 1 and more.")
    devices = _devices(plan, gpus)
    ring, ulysses = _degrees(plan, len(devices), limits)
    return ResolvedPlan(devices=devices, ring=ring, ulysses=ulysses, attention=plan.attention)


def _devices(plan: ParallelPlan, gpus: int) -> tuple[str, ...]:
    wish = plan.devices.strip().lower()
    if wish == "auto":
        available = tuple(f"cuda:{index}" for index in range(gpus)) or ("cpu",)
        wanted = plan.ring * plan.ulysses
        if wanted > len(available):
            have = f"{gpus} GPU{'s are' if gpus != 1 else ' is'} visible" if gpus else "no GPU is visible"
            instead = f", or write cpu:{wanted} into devices" if wanted <= MAX_WORLD_SIZE else ""
            raise Refused(
                f"ring {plan.ring} x ulysses {plan.ulysses} needs {wanted} devices and {have}: "
                f"lower the degrees to a product of {len(available)}{instead}."
            )
        return available[: wanted or None]
    if wish.startswith("cpu"):
        count = wish.removeprefix("cpu").removeprefix(":") or "1"
        if not count.isdecimal() or not 1 <= int(count) <= MAX_WORLD_SIZE:
            raise Refused(f"devices {plan.devices!r}: write cpu:N with N from 1 to {MAX_WORLD_SIZE}, such as cpu:2.")
        return ("cpu",) * int(count)
    names = [part.strip().removeprefix("cuda:") for part in wish.split(",") if part.strip()]
    if not names or not all(name.isdecimal() for name in names):
        raise Refused(
            f'devices {plan.devices!r} is not understood: write "auto", GPU indices such as "0,1", or "cpu:2".'
        )
    missing = sorted({int(name) for name in names if int(name) >= gpus})
    if missing:
        shown = (
            f"GPUs 0 to {gpus - 1} are visible" if gpus > 1 else "only GPU 0 is visible" if gpus else "none is visible"
        )
        instead = ",".join(str(index) for index in range(gpus)) if gpus else "cpu:2"
        raise Refused(
            f"devices {plan.devices!r} asks for GPU {', '.join(map(str, missing))}, but {shown}: "
            f"use {instead} (ComfyUI hides GPUs that --cuda-device or CUDA_VISIBLE_DEVICES leave out)."
        )
    if len(names) > MAX_WORLD_SIZE:
        raise Refused(f"devices lists {len(names)} workers; at most {MAX_WORLD_SIZE} are supported.")
    return tuple(f"cuda:{int(name)}" for name in names)


def _degrees(plan: ParallelPlan, world: int, limits: ModelLimits) -> tuple[int, int]:
    ring, ulysses = plan.ring, plan.ulysses
    best = largest_divisor(world, limits.heads)
    if ulysses > limits.heads:
        raise Refused(
            f"ulysses {ulysses} is more than the model's {limits.heads} attention heads: "
            f"use ring {world // best} x ulysses {best}."
        )
    if not ulysses and not ring:
        ulysses = best
    if world % (ring or 1) or world % (ulysses or 1) or (ring and ulysses and ring * ulysses != world):
        asked = " x ".join(f"{axis} {degree}" for axis, degree in (("ring", ring), ("ulysses", ulysses)) if degree)
        raise Refused(
            f"{asked} does not come to the {world} workers of devices {plan.devices!r}: "
            f"use ring {world // best} x ulysses {best}, set both to 0 (automatic), or choose other devices."
        )
    ring = ring or world // ulysses
    ulysses = ulysses or world // ring
    if ulysses > limits.heads:
        raise Refused(
            f"ring {ring} on {world} workers leaves ulysses {ulysses}, more than the model's {limits.heads} "
            f"attention heads: use ring {world // best} x ulysses {best}."
        )
    return ring, ulysses


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`."""
    return max(d for d in range(1, min(number, limit) + 1) if math.gcd(number, d) == d)
