"""The names of a plan's devices."""

from __future__ import annotations

from ..errors import PlanRefused
from .plan import MAX_WORLD_SIZE

AUTOMATIC_AMONG = "auto:"
"""Prefix of a list of GPUs of which a plan uses as many as its degrees need."""
MOST_DIGITS = 9
HIDDEN = "--cuda-device or CUDA_VISIBLE_DEVICES"
"""The settings that keep a GPU from ComfyUI."""
LONGEST_SHOWN = 60
"""Characters of the user's text that a message repeats."""


def named_devices(text: str, gpus: int) -> tuple[str, ...]:
    """Parse a plan's `devices` and return one device for each worker.

    "auto" and "all" are every GPU, or one CPU worker if there is no GPU. "0-2" is "0,1,2". "auto:0,2" lists the GPUs that
    were chosen for automatic devices.

    Args:
        text: the plan's `devices`.
        gpus: the number of visible GPUs.

    Raises:
        Refused: the text is not understood or names a GPU that is not there.
    """
    if text.strip().startswith("tcp://"):  # workers on other machines, which `Backend.placed_on_devices` has asked
        return tuple(text.strip().split(","))
    requested_plan = text.strip().lower()
    if requested_plan in ("auto", "all"):
        return tuple(f"cuda:{index}" for index in range(gpus)) or ("cpu",)
    if requested_plan.startswith("cpu"):
        count = requested_plan.removeprefix("cpu").removeprefix(":") or "1"
        if not count.isdecimal() or not 1 <= _number(count) <= MAX_WORLD_SIZE:
            raise PlanRefused(
                f"devices {_short(text)!r}: write cpu:N with N from 1 to {MAX_WORLD_SIZE}, such as cpu:2."
            )
        return ("cpu",) * _number(count)
    parts = [part.strip() for part in requested_plan.removeprefix(AUTOMATIC_AMONG).split(",") if part.strip()]
    indices = [index for part in parts for index in _indices(part, text)]
    if not indices:
        raise _not_understood(text)
    missing = sorted({index for index in indices if index >= gpus})
    if missing:
        there = ",".join(str(index) for index in range(gpus))
        cure = (
            f"set devices to {there} ({HIDDEN} may hide others)"
            if gpus
            else f"run nvidia-smi; if it lists GPUs, {HIDDEN} hides them or torch cannot use them, and if not, install the "
            "NVIDIA driver (cpu:2 in devices is for trials without GPUs)"
        )
        raise PlanRefused(
            f"devices {_short(text)!r} asks for GPU {', '.join(map(str, missing))}, but {visible(gpus)}: {cure}."
        )
    if len(indices) > MAX_WORLD_SIZE:
        raise PlanRefused(
            f"devices {_short(text)!r} lists {len(indices)} workers; at most {MAX_WORLD_SIZE} are supported: list fewer."
        )
    return tuple(f"cuda:{index}" for index in indices)


def _indices(part: str, text: str) -> range:
    """Return the GPU indices of "1", "cuda:1" or "0-2". A range is cut to one more device than any plan may have."""
    first, dash, last = part.removeprefix("cuda:").partition("-")
    ends = [end.strip().removeprefix("cuda:") for end in ((first, last) if dash else (first, first))]
    if not all(end.isdecimal() for end in ends) or _number(ends[0]) > _number(ends[1]):
        raise _not_understood(text)
    start = _number(ends[0])
    return range(start, min(_number(ends[1]), start + MAX_WORLD_SIZE) + 1)


def _not_understood(text: str) -> PlanRefused:
    return PlanRefused(
        f'devices {_short(text)!r} is not understood: write "auto", "all", GPU indices such as "0,1" or "0-3", or "cpu:2".'
    )


def _number(digits: str) -> int:
    """Return the number of the first digits. Python refuses to convert very long ones, and the first suffice for any limit."""
    return int(digits.lstrip("0")[:MOST_DIGITS] or "0")


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def visible(gpus: int) -> str:
    """Return in words which GPUs are visible, given their number."""
    if gpus == 0:
        return "no GPU is visible"
    return "only GPU 0 is visible" if gpus == 1 else f"GPUs 0 to {gpus - 1} are visible"
