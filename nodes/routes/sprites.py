"""Files for the template that runs without a GPU, copied from the pack to ComfyUI's folders."""

from __future__ import annotations

import shutil
from pathlib import Path

import folder_paths
from aiohttp import web

from ...parallel_backend.sprites import sprites
from .route import as_json


def put_sprites() -> web.Response:
    """Copy the missing files. The reply says how many files were copied, or why none could be."""
    try:
        count = copy_sprites()
    except OSError as error:
        message = (
            f"the files could not be copied ({error}): make room, or look at the permissions of ComfyUI's folders."
        )
        return as_json({"said": message}, 500)
    return as_json({"copied": count})


def copy_sprites() -> int:
    """Copy the missing files, and return their number. Never overwrite a file. A file appears whole or not at all.

    Raises:
        OSError: a file cannot be written.
    """
    copied = 0
    for folder, source in sprites():
        target = _folder(folder) / source.name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_name(f".{target.name}.part")
            shutil.copyfile(source, part)
            part.replace(target)
            copied += 1
    return copied


def _folder(name: str) -> Path:
    """Return the path of one of ComfyUI's folders."""
    models = name.removeprefix("models/")
    return Path(folder_paths.get_input_directory() if models == name else Path(folder_paths.models_dir, models))
