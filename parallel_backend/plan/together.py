"""Which GPUs of a machine are worth using together: all wait for the slowest of them."""

from __future__ import annotations

from collections.abc import Sequence

from ..gpus import Gpu

TENSOR_CORES_FOR_BF16 = (8, 0)
"""Compute capability; older GPUs compute in fp16 or fp32, without flash attention."""

OLDER = 0.5
DISPLAY = 0.9
"""The part of its speed that is left to an older GPU, and to one that draws a desktop."""

LEAST_MEMORY = 0.5
"""Of the largest GPU's: what fits into each of them is what a plan may need."""


def worth_together(gpus: Sequence[Gpu]) -> tuple[int, ...]:
    """The indices of the GPUs that `auto` uses.

    A GPU's pace is the number of its multiprocessors, less for an older one or one with a display. So many of the fastest are
    taken that their number times the pace of the slowest is largest. GPUs with little memory are left out.
    """
    largest = max(gpu.memory for gpu in gpus)
    roomy = [index for index, gpu in enumerate(gpus) if gpu.memory >= LEAST_MEMORY * largest]
    fastest = sorted(roomy, key=lambda index: -pace(gpus[index]))
    count = max(range(1, len(fastest) + 1), key=lambda number: (number * pace(gpus[fastest[number - 1]]), number))
    return tuple(sorted(fastest[:count]))


def pace(gpu: Gpu) -> float:
    """A measure of a GPU's speed, good enough to tell kinds apart."""
    older = OLDER if gpu.capability < TENSOR_CORES_FOR_BF16 else 1.0
    return gpu.multiprocessors * older * (DISPLAY if gpu.display else 1.0)


def why(gpus: Sequence[Gpu], used: Sequence[int]) -> str:
    """Why some are left out, as a sentence."""
    left = ", ".join(_described(index, gpu) for index, gpu in enumerate(gpus) if index not in used)
    everyone = ",".join(str(index) for index in range(len(gpus)))
    return (
        f"devices auto leaves out {left}: workers wait for the slowest and hold what fits into the smallest, so "
        f"{_listed(used)} {'are' if len(used) > 1 else 'is'} faster without; write {everyone} into devices of Parallel Plan to "
        "use all."
    )


def _described(index: int, gpu: Gpu) -> str:
    display = ", with a display" if gpu.display else ""
    return f"GPU {index} ({gpu.name}, {gpu.multiprocessors} multiprocessors, {gpu.memory / 1e9:.1f} GB{display})"


def _listed(used: Sequence[int]) -> str:
    return f"GPU{'s' if len(used) > 1 else ''} {', '.join(map(str, used))}"
