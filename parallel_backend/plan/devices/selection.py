"""Which GPUs of a machine are worth using together, each doing as much as suits its speed."""

from __future__ import annotations

from collections.abc import Sequence

from ...gpus import Gpu

TENSOR_CORES_FOR_BF16 = (8, 0)
"""Compute capability; older GPUs compute in fp16 or fp32, without flash attention."""

OLDER = 0.5
DISPLAY = 0.9
"""The part of its speed that is left to an older GPU, and to one that draws a desktop."""

LEAST_PACE = 1 / 3
"""Of the fastest GPU's: what a slower one would take off the others is less than what exchanging with it costs."""

LEAST_MEMORY = 0.5
"""Of the largest GPU's: what each rank of Ulysses and Ring holds whole has to fit into the smallest."""


def select_gpus(gpus: Sequence[Gpu]) -> tuple[int, ...]:
    """The indices of the GPUs that `auto` uses.

    GPUs with little memory are left out, and of the others those that are much slower than the fastest.
    """
    largest = max(gpu.memory for gpu in gpus)
    large = [index for index, gpu in enumerate(gpus) if gpu.memory >= LEAST_MEMORY * largest]
    fastest = max(pace(gpus[index]) for index in large)
    return tuple(index for index in large if pace(gpus[index]) >= LEAST_PACE * fastest)


def pace(gpu: Gpu) -> float:
    """A measure of a GPU's speed, good enough to tell kinds apart: its multiprocessors, less if it is old or has a display."""
    older = OLDER if gpu.capability < TENSOR_CORES_FOR_BF16 else 1.0
    return gpu.multiprocessors * older * (DISPLAY if gpu.display else 1.0)


def why(gpus: Sequence[Gpu], used: Sequence[int]) -> str:
    """Return a sentence on why some GPUs are left out."""
    excluded = ", ".join(_described(index, gpu) for index, gpu in enumerate(gpus) if index not in used)
    everyone = ",".join(str(index) for index in range(len(gpus)))
    return (
        f"devices auto leaves out {excluded}: a GPU that is less than a third as fast as the fastest, or has less than half of "
        f"the largest one's memory, would hold up {_listed(used)}; write {everyone} into devices of Parallel Plan to use all."
    )


def _described(index: int, gpu: Gpu) -> str:
    display = ", with a display" if gpu.display else ""
    return f"GPU {index} ({gpu.name}, {gpu.multiprocessors} multiprocessors, {gpu.memory / 1e9:.1f} GB{display})"


def _listed(used: Sequence[int]) -> str:
    return f"GPU{'s' if len(used) > 1 else ''} {', '.join(map(str, used))}"
