"""The contents of the folders of the tests' ComfyUI."""

from __future__ import annotations

import torch
from PIL import Image

from scripts.comfyui import REPO, ComfyUI
from tests.support.tiny.flux import save_conditioning, save_flux

TEXT_LENGTHS = (1, 37, 256, 300, 512)
NARROW, NARROW_DEV = "narrow-schnell", "narrow-dev"


def fill(server: ComfyUI) -> None:
    """Put the tests' models and prompts into a server's folders."""
    models = server.base_dir / "models" / "diffusion_models"
    save_flux(models / "tiny-schnell.safetensors")
    save_flux(models / "tiny-dev.safetensors", guidance=True, seed=1)
    save_flux(models / "tiny-3-heads.safetensors", heads=3, seed=2)
    save_flux(models / f"{NARROW}.safetensors", heads=2, seed=3)
    save_flux(models / f"{NARROW_DEV}.safetensors", heads=2, guidance=True, seed=4)
    sprites = REPO / "workflows" / "sprites"
    server.add_model("diffusion_models", [sprites / "sprites-flux-schnell.safetensors"])
    server.add_model("vae_approx", sprites.glob("taef1_*.safetensors"))
    server.add_input([*sprites.glob("*-on-*.safetensors"), sprites / "empty.safetensors"])
    for tokens in (*TEXT_LENGTHS, 45):  # a second text only has to be longer than the first
        save_conditioning(server.input_dir / f"cond-{tokens}.safetensors", tokens)
    save_conditioning(server.input_dir / "cond-37-other.safetensors", 37, seed=1)


def save_picture(server: ComfyUI, name: str, size: tuple[int, int], cells: tuple[int, int], seed: int = 0) -> None:
    """Write a picture of random colours. `size` is its width and height, `cells` the rows and columns of colours."""
    colours = torch.randint(0, 256, (*cells, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    Image.fromarray(colours.numpy()).resize(size, Image.Resampling.NEAREST).save(server.input_dir / name)
