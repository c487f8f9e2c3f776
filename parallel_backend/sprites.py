"""The small model that this pack brings along, with its autoencoder and prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

SPRITES = Path(__file__).parents[1] / "workflows" / "sprites"


def sprites() -> Iterator[tuple[str, Path]]:
    """Its files, each with the folder that it belongs into in ComfyUI's."""
    for file in sorted(SPRITES.glob("*.safetensors")):
        yield _folder(file.name), file


def _folder(name: str) -> str:
    if name.startswith("taef1_"):
        return "models/vae_approx"
    if name.startswith("sprites-"):
        return "models/diffusion_models"
    return "input"
