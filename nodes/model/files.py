"""The model files that loader nodes offer: Load Diffusion Model's files, GGUF files, full checkpoints, diffusers folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import folder_paths

from ...parallel_backend.errors import Refused
from ...parallel_backend.weights.files.checkpoint import read_header
from ...parallel_backend.weights.files.safetensors_file import is_diffusers_folder

MODELS, CHECKPOINTS, DIFFUSERS = "diffusion_models", "checkpoints", "diffusers"
"""ComfyUI's folders. Names from the last two begin with the folder; those from the first equal Load Diffusion Model's names."""


def choices() -> list[str]:
    """Return the names of all model files that a loader offers."""
    full = [f"{CHECKPOINTS}/{name}" for name in folder_paths.get_filename_list(CHECKPOINTS)]
    names = [*folder_paths.get_filename_list(MODELS), *_gguf_files(), *full, *_folders()]
    return list(dict.fromkeys(names))


def path_of(name: str) -> str:
    """Return the path of a choice.

    Raises:
        Refused: the file is gone.
    """
    path = folder_paths.get_full_path(MODELS, name) or _folders().get(name)
    if path is None and name.startswith(f"{CHECKPOINTS}/"):
        path = folder_paths.get_full_path(CHECKPOINTS, name.removeprefix(f"{CHECKPOINTS}/"))
    if path is None:
        raise Refused(f"{name} is in none of ComfyUI's model folders: put it there or pick another checkpoint.")
    return str(path)


def path_in(folder: str, name: str) -> str:
    """Return the path of a file in one of ComfyUI's model folders. Raise Refused if there is none."""
    path = folder_paths.get_full_path(folder, name)
    if path is None:
        raise Refused(f"{name} is no file in models/{folder}: download it, or pick another.")
    return str(path)


def fingerprint_of(name: str) -> str:
    """Return a checkpoint's fingerprint, which changes when the file is replaced, or the reason why it cannot be read."""
    try:
        return str(read_header(path_of(name)).fingerprint())
    except Refused as refusal:
        return str(refusal)


def _gguf_files() -> Iterator[str]:
    for directory in folder_paths.get_folder_paths(MODELS):
        files, _ = folder_paths.recursive_search(directory, excluded_dir_names=[".git"])
        yield from sorted(folder_paths.filter_files_extensions(files, [".gguf"]))


def _folders() -> dict[str, Path]:
    """Return the paths of diffusers folders in both kinds of model folders, by their names as choices."""
    folders: dict[str, Path] = {}
    for kind, prefix in ((MODELS, ""), (DIFFUSERS, f"{DIFFUSERS}/")):
        for directory in map(Path, folder_paths.get_folder_paths(kind)):
            if directory.is_dir():
                for folder in sorted(path for path in directory.iterdir() if path.is_dir()):
                    if is_diffusers_folder(folder):
                        folders.setdefault(prefix + folder.name, folder)
    return folders
