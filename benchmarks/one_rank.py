"""Compares sequence parallelism on one rank with ComfyUI's own forward: CPU seconds, their ratio, and Python's calls.

    OMP_NUM_THREADS=1 python -m benchmarks.one_rank [--runs 20] [--size 64] [--only TEXT]

One rank runs ComfyUI's own forward through the pack's mechanism. Random models of ComfyUI's classes run on the CPU by turns,
and the first of a pair alternates. The results are the thread's own seconds and the median of the neighbours' ratios, so that
other processes hardly count. COMFYUI_PATH names ComfyUI's folder. Large tensors that return to the system, and are allocated
again in another order, change results by 15 % either way. MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=17179869184
in the environment keeps them in the process.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from parallel_backend.models.comfyui.proof.rank import ProofRank, plan_for
from parallel_backend.models.comfyui.small import Case, small
from tests.support.comfy_oracle import comfy_on_path
from tests.support.tiny.models import draw

FAMILIES = ("flux", "qwen-image", "wan, text", "z-image")


def enlarged(case: Case, size: int) -> Case:
    """Return the call on a picture of `size` x `size` latent values, or on a video of 3 such frames."""
    return replace(case, x=draw(*case.x.shape[:-2], size, size, seed=1))


def seconds(function: Callable[[], Any]) -> float:
    """Return the CPU seconds of one call on one thread."""
    started = time.thread_time()
    function()
    return time.thread_time() - started


def calls(function: Callable[[], Any]) -> int:
    """Return the number of calls of Python's and built-in functions in one call."""
    profile = cProfile.Profile()
    profile.runcall(function)
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


@torch.no_grad()
def compare(name: str, size: int, runs: int) -> tuple[tuple[list[float], list[float]], tuple[int, int]]:
    """Return for ComfyUI's own forward and for ours the seconds of each run, and the number of function calls in one run."""
    case = enlarged(small(name), size)
    rank = ProofRank(case, plan_for(case))
    first = rank.run()
    assert isinstance(first, Tensor) and torch.equal(first, case.stock()), "the same bits"
    counted = calls(case.stock), calls(rank.run)
    spent: dict[Callable[[], Any], list[float]] = {case.stock: [], rank.run: []}
    for turn in range(runs):
        for forward in (*spent,) if turn % 2 else (*reversed(spent),):
            spent[forward].append(seconds(forward))
    theirs, ours = spent.values()
    return (theirs, ours), counted


def main() -> None:
    """Print one row per family."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--size", type=int, default=64, help="latent values along each side")
    parser.add_argument("--only", default="", help="only families whose name contains TEXT", metavar="TEXT")
    options = parser.parse_args()
    comfy_on_path()
    torch.set_num_threads(1)
    print(
        f"{'family':<14}{'ComfyUI, s':>12}{'one rank, s':>13}{'median of ratios':>18}{'of the fastest':>16}{'calls':>14}"
    )
    for name in (family for family in FAMILIES if options.only in family):
        both, counted = compare(name, options.size, options.runs)
        ratio = statistics.median(ours / theirs for theirs, ours in zip(*both, strict=True))
        (theirs, ours), (least, least_ours) = map(statistics.median, both), map(min, both)
        print(
            f"{name:<14}{theirs:>12.4f}{ours:>13.4f}{ratio:>18.3f}{least_ours / least:>16.3f}"
            f"{'{} : {}'.format(*counted):>14}",
            flush=True,
        )


if __name__ == "__main__":
    main()
