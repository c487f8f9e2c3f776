"""The files of the small model that this pack includes, with its autoencoder and prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

SPRITES = Path(__file__).parents[1] / "workflows" / "sprites"


def sprites() -> Iterator[tuple[str, Path]]:
    """Yield the model's files, each after its destination folder, relative to ComfyUI's folder."""
    for file in sorted(SPRITES.glob("*.safetensors")):
        yield _folder(file.name), file


def _folder(name: str) -> str:
    if name.startswith("taef1_"):
        return "models/vae_approx"
    if name.startswith("sprites-"):
        return "models/diffusion_models"
    return "input"
