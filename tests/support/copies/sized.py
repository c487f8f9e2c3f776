"""A ComfyUI that reads classes and sizes from files, so that small models run where its detection assumes full sizes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from parallel_backend.wire.handshake import VARIABLE
from scripts.comfyui import PACKS, REPO, ComfyUI

SIZES = """

_taken_for_granted = model_config_from_unet


def model_config_from_unet(*args, metadata=None, **kwargs):
    sizes = json.loads((metadata or {}).get("sizes", "{}"))
    if "class" in (metadata or {}):
        found = getattr(comfy.supported_models, metadata["class"])(sizes)
    else:
        found = _taken_for_granted(*args, metadata=metadata, **kwargs)
    if found is not None:
        found.unet_config |= sizes
    return found
"""

VAE_SIZES = """

_made = VAE.__init__


def _sized(of_a_kind, sizes):
    def change(settings):
        if "num_res_blocks" in settings:
            settings |= sizes
        for inner in settings.values():
            if isinstance(inner, dict):
                change(inner)
        return settings

    return lambda **settings: of_a_kind(**change(settings))


def _with_sizes(self, sd=None, device=None, config=None, dtype=None, metadata=None):
    global AutoencoderKL, AutoencodingEngine
    known = AutoencoderKL, AutoencodingEngine, comfy.ldm.wan.vae2_2.WanVAE
    sizes = json.loads((metadata or {}).get("sizes", "{}"))
    AutoencoderKL, AutoencodingEngine, comfy.ldm.wan.vae2_2.WanVAE = (_sized(kind, sizes) for kind in known)
    try:
        _made(self, sd, device, config, dtype, metadata)
    finally:
        AutoencoderKL, AutoencodingEngine, comfy.ldm.wan.vae2_2.WanVAE = known


VAE.__init__ = _with_sizes
"""
"""Source that is appended to ComfyUI's `sd.py`, so that VAEs read their sizes from the file."""


def sized_copy(folder: Path, **code: str) -> ComfyUI:
    """Copy the ComfyUI under test into a folder, with `SIZES`.

    `code` is appended to the files of these names in its package.
    """
    return copied(folder, {f"comfy/{file}.py": behind for file, behind in {"model_detection": SIZES, **code}.items()})


def copied(folder: Path, code: Mapping[str, str]) -> ComfyUI:
    """Copy the ComfyUI under test into a folder. `code` is appended to its files of these names."""
    copy = folder / "ComfyUI"
    shutil.copytree(os.environ["COMFYUI_PATH"], copy, ignore=shutil.ignore_patterns(".git", "__pycache__"))
    for file, behind in code.items():
        with (copy / file).open("a") as written:
            written.write(behind)
    return ComfyUI(
        copy,
        folder / "base",
        env={VARIABLE: str(folder / "secret"), "XDG_CACHE_HOME": str(folder / "cache")},
        packs={**PACKS, "other-pack": REPO / "tests" / "support" / "other_pack"},
    )
