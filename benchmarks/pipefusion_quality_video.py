"""Measures the error of PipeFusion's clips: PSNR for a small CogVideoX, by the engine itself on one CPU worker.

From the repository's root: python -m benchmarks.pipefusion_quality_video MODEL.safetensors

No small trained CogVideoX exists, so the script trains one if the file is missing. It is of 2b's type and trained on clips of a
moving square, always the same, in three minutes on one core. Then the script samples every caption with three seeds, 28 DDIM
steps and cfg 2, and prints a Markdown table.
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path
from typing import Any

import torch
from diffusers import CogVideoXTransformer3DModel
from torch import Tensor
from torch.nn import functional as F

from parallel_backend.diffusion import DiffusionSettings, PromptSpec
from parallel_backend.host import Backend
from parallel_backend.models.diffusers.cogvideox_keys import comfy_name
from tests.engine.conftest import Runner
from tests.support.plans import cpu_plan
from tests.support.programs import VelocitySampling, encoded_program
from tests.support.tiny.cogvideox import schedulers
from tests.support.tiny.models import save_model

FRAMES, SIZE = 3, 16
COLOURS = torch.tensor([[1.0, 0, 0], [0, 0.7, 0], [0, 0, 1], [1, 1, 0], [1, 1, 1], [0, 0, 0]])
DIRECTIONS = torch.tensor([[0.0, 2], [2, 0], [0, -2], [-2, 0]])
CAPTIONS = ((0, 4, 0), (2, 3, 1), (1, 5, 2), (4, 0, 3), (3, 2, 0), (5, 4, 1))
"""Colour, background and direction of each caption, as indices."""

TEXT_WIDTH = 32
SEEDS = (1, 2, 3)
PATCHES = (2, 4, 8)
WARMUP_STEPS = (1, 2, 4)
CFG = 2.0
BATCH = 16
LAYERS = 4


def fixed(*shape: int) -> Tensor:
    """Return random numbers that are always the same."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


CHANNELS_OF_COLOURS = torch.linalg.qr(fixed(16, 3))[0]
"""Matrix that turns colours into a latent's 16 channels. It loses nothing, so no autoencoder is needed."""

WORDS = fixed(3, len(COLOURS), TEXT_WIDTH)


def texts(captions: Tensor) -> Tensor:
    """Return the embeddings `[batch, 3, width]` of captions `[batch, 3]`."""
    return torch.stack([WORDS[place, captions[:, place]] for place in range(3)], dim=1)


def clips(captions: Tensor, places: Tensor) -> Tensor:
    """Return latents `[batch, 16, frames, height, width]` of a moving square of 6.

    Args:
        captions: colours, backgrounds and directions, `[batch, 3]`.
        places: the square's first corner in each clip, `[batch, 2]`.
    """
    frames = torch.arange(FRAMES).float()[None, :, None]
    corners = (places[:, None] + frames * DIRECTIONS[captions[:, 2]][:, None])[..., None] % SIZE
    row, column = ((torch.arange(SIZE) - corners) % SIZE < 6).unbind(2)
    inside = (row[..., None] & column[..., None, :]).float()[..., None]
    colour, ground = (COLOURS[captions[:, part]][:, None, None, None] for part in (0, 1))
    return (((inside * colour + (1 - inside) * ground) * 2 - 1) @ CHANNELS_OF_COLOURS.T).movedim(4, 1)


def colours(latents: Tensor) -> Tensor:
    """Convert latents to colours from 0 to 1."""
    return ((latents.movedim(1, 4) @ CHANNELS_OF_COLOURS + 1) / 2).clamp(0, 1)


def train(path: Path, steps: int) -> None:
    """Train the model and write its file."""
    torch.manual_seed(0)
    model: Any = CogVideoXTransformer3DModel(
        num_attention_heads=6,
        attention_head_dim=16,
        num_layers=LAYERS,
        time_embed_dim=128,
        text_embed_dim=TEXT_WIDTH,
        max_text_seq_length=3,
        sample_height=SIZE,
        sample_width=SIZE,
        sample_frames=4 * FRAMES - 3,
    )
    kept = schedulers("2b")["cogvideox_ddim"].alphas_cumprod.float()
    optimiser = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=2e-3, total_steps=steps, pct_start=0.1)
    losses = []
    for step in range(steps):
        captions = torch.stack([torch.randint(len(COLOURS), (BATCH,)) for _ in range(2)], dim=1)
        captions = torch.cat([captions, torch.randint(len(DIRECTIONS), (BATCH, 1))], dim=1)
        clean = clips(captions, torch.randint(SIZE, (BATCH, 2)).float())
        timestep, noise = torch.randint(len(kept), (BATCH,)), torch.randn_like(clean)
        signal, spread = (level.sqrt()[:, None, None, None, None] for level in (kept[timestep], 1 - kept[timestep]))
        text = texts(captions) * (torch.rand(BATCH, 1, 1) > 0.1)
        noisy = signal * clean + spread * noise
        output = model(noisy.transpose(1, 2), text, timestep, return_dict=False)[0].transpose(1, 2)
        loss = F.mse_loss(output, signal * noise - spread * clean)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        losses.append(loss.item())
        if step % 100 == 99:
            print(f"step {step + 1}: loss {statistics.mean(losses[-100:]):.4f}", flush=True)
    save_model(path, model.state_dict(), comfy_name)


def psnr(pictures: Tensor, exact: Tensor) -> list[float]:
    """Return the PSNR of each clip in decibels, for values from 0 to 1."""
    errors = (pictures - exact).square().flatten(1).mean(dim=1).tolist()
    return [-10 * math.log10(error) if error else math.inf for error in errors]


def make(run: Runner, path: Path, steps: int, patches: int, warmup_steps: int) -> Tensor:
    """Sample all captions with all seeds, and return the clips as colours."""
    alphas = schedulers("2b")["cogvideox_ddim"].alphas_cumprod.clone()
    alphas[-1] = 4.8973451890853435e-08  # ComfyUI's tables end here where the terminal SNR is zero
    table = ((1 - alphas) / alphas).sqrt().float()
    times = torch.arange(1000, 0, -1000 / steps).round().long() - 1
    sigmas = torch.cat([table[times], torch.zeros(1)])
    shape = (16, FRAMES, SIZE, SIZE)
    noise = torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in SEEDS])
    text = texts(torch.tensor(CAPTIONS)).repeat_interleave(len(SEEDS), dim=0)
    noise = noise.repeat(len(CAPTIONS), 1, 1, 1, 1)
    tensors = {
        "x": noise * (1 + sigmas[0] ** 2).sqrt(),
        "sigmas": sigmas,
        "log_sigmas": table.log(),
        "program": encoded_program("cogvideox_ddim", sigmas, noise, model_sampling=VelocitySampling()),
        "prompt.positive.context": text,
        "prompt.negative.context": torch.zeros_like(text),
    }
    return colours(
        run.sample(
            "cogvideox",
            path,
            tensors,
            cpu_plan(patches=patches, warmup_steps=warmup_steps, blocks=LAYERS),
            sampling=DiffusionSettings("v"),
            cfg=CFG,
            positive=[PromptSpec({"context": "prompt.positive.context"})],
            negative=[PromptSpec({"context": "prompt.negative.context"})],
        )
    )


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--training-steps", type=int, default=400)
    chosen = parser.parse_args()
    if not chosen.model.exists():
        train(chosen.model, chosen.training_steps)
    run = Runner(Backend())
    try:
        exact = make(run, chosen.model, chosen.steps, 1, chosen.steps)
        print(f"\n{len(exact)} clips, {chosen.steps} steps; PSNR against the exact run, dB\n")
        print("| patches | warm-up steps | median | lowest |\n| ---: | ---: | ---: | ---: |")
        settings = [(patches, warmup) for patches in PATCHES for warmup in WARMUP_STEPS]
        rows = [((*setting, chosen.steps), [str(part) for part in setting]) for setting in settings]
        rows.append(((1, chosen.steps, chosen.steps // 2), [f"exact, {chosen.steps // 2} steps", "-"]))
        for (patches, warmup, steps), names in rows:
            decibels = psnr(make(run, chosen.model, steps, patches, warmup), exact)
            print(f"| {' | '.join(names)} | {statistics.median(decibels):.1f} | {min(decibels):.1f} |", flush=True)
    finally:
        run.close()


if __name__ == "__main__":
    main()
