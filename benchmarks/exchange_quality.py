"""How far pictures are whose attention is exchanged in fp8 from the exact ones: PSNR for the sprites model, in one process.

From the repository's root: COMFYUI_PATH=... python -m benchmarks.exchange_quality
The pictures of pipefusion_quality, each attention of queries, keys, values and results that have travelled under Ulysses.
"""

from __future__ import annotations

import argparse
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.pipefusion_quality import CFG, LATENT, SEEDS, SPRITES, load_vae, prompts, psnr, row
from parallel_backend.attention.payload import FP8
from tests.pipefusion_simulation import ksampler_sigmas, load_model, process_out, simulate

import comfy.ldm.flux.math  # isort: skip


def travelled(x: Tensor) -> Tensor:
    """As the ranks have it."""
    return FP8.unpacked(FP8.packed(x), x.dtype)


def exchanged(kernel: Any) -> Any:
    """The model's attention, of heads that are apart, with what it is given and gives exchanged."""

    def attention(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = kernel(*map(travelled, (q, k, v)), *args, **kwargs)
        return travelled(out.unflatten(-1, (q.shape[1], -1))).flatten(-2)

    return attention


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=28)
    steps = parser.parse_args().steps
    model, vae = load_model(load_file(SPRITES / "sprites-flux-schnell.safetensors")), load_vae()
    positive, negative = prompts()
    noise = torch.cat([torch.randn(LATENT, generator=torch.Generator().manual_seed(seed)) for seed in SEEDS])
    noise = noise.repeat(len(positive[0]) // len(SEEDS), 1, 1, 1)

    def draw(steps: int) -> Tensor:
        sigmas = ksampler_sigmas(model, steps, sampler="euler")
        latent = simulate(
            {}, model=model, noise=noise, sigmas=sigmas, positive=positive, negative=negative, cfg=CFG, sampler="euler",
            patches=1, warmup_steps=steps,
        )  # fmt: skip
        return vae.decode(process_out(latent))

    exact, half = draw(steps), draw(steps // 2)
    print(f"{len(noise)} pictures, {steps} steps; PSNR against the exact run, dB\n")
    print("| exchange | steps | median | minimum |\n|---|---|---|---|")
    kernel = comfy.ldm.flux.math.optimized_attention
    with mock.patch.object(comfy.ldm.flux.math, "optimized_attention", exchanged(kernel)):
        print(row("fp8", str(steps), psnr(draw(steps), exact)))
    print(row("exact", str(steps // 2), psnr(half, exact)))


if __name__ == "__main__":
    main()
