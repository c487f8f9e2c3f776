"""Measures the error of pictures whose attention is exchanged in fp8: PSNR for the sprites model, in one process.

From the repository's root: COMFYUI_PATH=... python -m benchmarks.exchange_quality
It draws the pictures of pipefusion_quality. Each attention gets queries, keys and values, and gives results, as they arrive
under Ulysses.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

from torch import Tensor

from benchmarks.pipefusion_quality import drawing, psnr, row, steps_asked
from parallel_backend.attention.codec import FP8

import comfy.ldm.flux.math  # isort: skip


def travelled(x: Tensor) -> Tensor:
    """Return a tensor as ranks receive it: encoded to fp8 and decoded."""
    return FP8.decode(FP8.encode(x), x.dtype)


def exchanged(kernel: Any) -> Any:
    """Return the model's attention function with its inputs and output, split into heads, exchanged in fp8."""

    def attention(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = kernel(*map(travelled, (q, k, v)), *args, **kwargs)
        return travelled(out.unflatten(-1, (q.shape[1], -1))).flatten(-2)

    return attention


def main() -> None:
    """Measure and print the table."""
    steps, draw = steps_asked(__doc__), drawing()
    exact, half = draw(steps, 1, steps), draw(steps // 2, 1, steps // 2)
    print(f"{len(exact)} pictures, {steps} steps; PSNR against the exact run, dB\n")
    print("| exchange | steps | median | minimum |\n|---|---|---|---|")
    kernel = comfy.ldm.flux.math.optimized_attention
    with mock.patch.object(comfy.ldm.flux.math, "optimized_attention", exchanged(kernel)):
        print(row("fp8", str(steps), psnr(draw(steps, 1, steps), exact)))
    print(row("exact", str(steps // 2), psnr(half, exact)))


if __name__ == "__main__":
    main()
