"""The graph that is measured unless another is named, and the folders in which ComfyUIs find what they need."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from .cards import PACK

GRAPH = PACK / "scripts" / "sprites_api.json"
"""The demo's graph: a small model that this pack brings along."""


def make_base(base: Path, comfyui: Path, files: Sequence[tuple[str, Path]]) -> None:
    """Make a base directory for ComfyUIs in an empty folder: models and packs of another ComfyUI, and this pack.

    Args:
        files: if there are any, these are all models and inputs.
    """
    for folder, file in files:
        (base / folder).mkdir(parents=True, exist_ok=True)
        shutil.copy(file, base / folder)
    if not files:
        (base / "models").symlink_to(comfyui / "models", target_is_directory=True)
    packs = base / "custom_nodes"
    packs.mkdir()
    for pack in (comfyui / "custom_nodes").glob("*"):
        (packs / pack.name).symlink_to(pack.resolve())
    if PACK not in (pack.resolve() for pack in packs.iterdir()):
        (packs / "ComfyUI-Parallel").symlink_to(PACK, target_is_directory=True)
