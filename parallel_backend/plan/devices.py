"""The devices a plan names, on a machine that shows a number of GPUs."""

from __future__ import annotations

from ..errors import Refused
from .plan import MAX_WORLD_SIZE

MOST_DIGITS = 9
LONGEST_SHOWN = 60
"""Characters of what the user wrote that a message repeats."""


def named_devices(text: str, gpus: int) -> tuple[str, ...]:
    """One device a worker; "auto" is every GPU, or one CPU worker where there is none.

    Raises:
        Refused: the text is not understood or names a GPU that is not there.
    """
    if text.strip().startswith("tcp://"):  # workers elsewhere: Backend.located has asked them
        return tuple(text.strip().split(","))
    wish = text.strip().lower()
    if wish == "auto":
        return tuple(f"cuda:{index}" for index in range(gpus)) or ("cpu",)
    if wish.startswith("cpu"):
        count = wish.removeprefix("cpu").removeprefix(":") or "1"
        if not count.isdecimal() or not 1 <= _number(count) <= MAX_WORLD_SIZE:
            raise Refused(f"devices {_short(text)!r}: write cpu:N with N from 1 to {MAX_WORLD_SIZE}, such as cpu:2.")
        return ("cpu",) * _number(count)
    names = [part.strip().removeprefix("cuda:") for part in wish.split(",") if part.strip()]
    if not names or not all(name.isdecimal() for name in names):
        raise Refused(
            f'devices {_short(text)!r} is not understood: write "auto", GPU indices such as "0,1", or "cpu:2".'
        )
    missing = sorted({_number(name) for name in names if _number(name) >= gpus})
    if missing:
        instead = ",".join(str(index) for index in range(gpus)) if gpus else "cpu:2"
        raise Refused(
            f"devices {_short(text)!r} asks for GPU {', '.join(map(str, missing))}, but {visible(gpus)}: "
            f"use {instead} (ComfyUI hides GPUs that --cuda-device or CUDA_VISIBLE_DEVICES leave out)."
        )
    if len(names) > MAX_WORLD_SIZE:
        raise Refused(f"devices lists {len(names)} workers; at most {MAX_WORLD_SIZE} are supported: list fewer.")
    return tuple(f"cuda:{int(name)}" for name in names)


def _number(digits: str) -> int:
    """The number; of one with more digits than Python converts, its first ones, which are more than there is of anything."""
    return int(digits.lstrip("0")[:MOST_DIGITS] or "0")


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def visible(gpus: int) -> str:
    """How many GPUs there are, in words."""
    if gpus == 0:
        return "no GPU is visible"
    return "only GPU 0 is visible" if gpus == 1 else f"GPUs 0 to {gpus - 1} are visible"
