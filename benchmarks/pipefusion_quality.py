"""Measures the error of PipeFusion's pictures: PSNR for the sprites model, by the one-process simulation.

From the repository's root: COMFYUI_PATH=... python -m benchmarks.pipefusion_quality
Every caption with three seeds, 28 steps of euler, simple, cfg 2; prints a Markdown table.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.pipefusion_simulation import Prompt, ksampler_sigmas, load_model, process_out, simulate

import comfy.sd  # isort: skip

SPRITES = Path(__file__).parents[1] / "workflows" / "sprites"
SEEDS = (1, 2, 3)
PATCHES = (2, 4, 8)
WARMUP_STEPS = (1, 2, 4)
CFG = 2.0
LATENT = (1, 16, 16, 16)


def prompts() -> tuple[Prompt, Prompt]:
    """Return a batch of every caption, once for each seed, and the empty prompt."""
    captions = [load_file(path) for path in sorted(SPRITES.glob("*-on-*.safetensors"))]
    pooled = "pooled_output"
    text, vector = (torch.cat([caption[key] for caption in captions for _ in SEEDS]) for key in ("cond", pooled))
    empty = load_file(SPRITES / "empty.safetensors")
    return (text, vector), (empty["cond"], empty[pooled])


def load_vae() -> Any:
    """Return the sprites' autoencoder, as Load VAE loads `taef1`."""
    parts = {
        f"taesd_{part}.{name}": tensor
        for part in ("encoder", "decoder")
        for name, tensor in load_file(SPRITES / f"taef1_{part}.safetensors").items()
    }
    return comfy.sd.VAE(sd=parts | {"vae_scale": torch.tensor(0.3611), "vae_shift": torch.tensor(0.1159)})


def psnr(pictures: Tensor, exact: Tensor) -> list[float]:
    """Return the PSNR of each picture in decibels, for values from 0 to 1."""
    errors = (pictures - exact).square().flatten(1).mean(dim=1).tolist()
    return [-10 * math.log10(error) if error else math.inf for error in errors]


def row(patches: str, warmup: str, decibels: list[float]) -> str:
    """Return a line of the table."""
    return f"| {patches} | {warmup} | {statistics.median(decibels):.1f} | {min(decibels):.1f} |"


def drawing() -> Callable[[int, int, int], Tensor]:
    """Return a function that draws every picture: `draw(steps, patches, warmup_steps)` gives `[pictures, height, width, 3]`."""
    model, vae = load_model(load_file(SPRITES / "sprites-flux-schnell.safetensors")), load_vae()
    positive, negative = prompts()
    noise = torch.cat([torch.randn(LATENT, generator=torch.Generator().manual_seed(seed)) for seed in SEEDS])
    noise = noise.repeat(len(positive[0]) // len(SEEDS), 1, 1, 1)

    def draw(steps: int, patches: int, warmup_steps: int) -> Tensor:
        latent = simulate(
            {},
            model=model,
            noise=noise,
            sigmas=ksampler_sigmas(model, steps, sampler="euler"),
            positive=positive,
            negative=negative,
            cfg=CFG,
            sampler="euler",
            patches=patches,
            warmup_steps=warmup_steps,
        )
        return vae.decode(process_out(latent))

    return draw


def steps_asked(description: str | None) -> int:
    """Return the number of steps from the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=28)
    return parser.parse_args().steps


def main() -> None:
    """Measure and print the table."""
    steps, draw = steps_asked(__doc__), drawing()
    exact = draw(steps, 1, steps)
    print(f"{len(exact)} pictures, {steps} steps; PSNR against the exact run, dB\n")
    print("| patches | warm-up steps | median | minimum |\n|---|---|---|---|")
    for patches in PATCHES:
        for warmup_steps in WARMUP_STEPS:
            decibels = psnr(draw(steps, patches, warmup_steps), exact)
            print(row(str(patches), str(warmup_steps), decibels), flush=True)
    print(row("none: exact,", f"{steps // 2} steps", psnr(draw(steps // 2, 1, 1), exact)))


if __name__ == "__main__":
    main()
