"""A diffusers folder: one safetensors file, or an index and the shards that it names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from ...errors import Refused
from .entry import Checkpoint

WEIGHTS = "diffusion_pytorch_model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
TRANSFORMER = "transformer"
"""Where a whole pipeline's folder has the denoiser."""

MAX_INDEX_BYTES = 100 * 2**20


def is_diffusers_folder(path: Path) -> bool:
    """Whether a folder has what `read_folder` reads."""
    return any((folder / name).is_file() for folder in (path, path / TRANSFORMER) for name in (WEIGHTS, INDEX))


def read_folder(path: Path, read_file: Callable[[Path], Checkpoint]) -> Checkpoint:
    """The headers of a diffusers folder's denoiser.

    Raises:
        Refused: there are no weights, or the index is damaged or names a file that is missing or lacks a tensor.
    """
    folder = path / TRANSFORMER if is_diffusers_folder(path / TRANSFORMER) else path
    if not is_diffusers_folder(folder):
        raise Refused(
            f"the folder {path.name} has no {WEIGHTS} and no {INDEX}: choose the folder of a diffusers transformer."
        )
    index = folder / INDEX
    if not index.is_file():
        part = read_file(folder / WEIGHTS)
        return Checkpoint(path, part.entries, part.files, part.metadata)
    weight_map = _read_index(path, index)
    parts = {}
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name:
            raise Refused(f"{INDEX} of {path.name} names {name}, which is outside the folder: download it again.")
        if not (folder / name).is_file():
            raise Refused(f"{path.name} lacks the file {name} that its index names: download it into {folder}.")
        parts[name] = read_file(folder / name)
    for tensor, name in weight_map.items():
        if tensor not in parts[name].entries:
            raise Refused(f"{name} of {path.name} lacks the tensor {tensor} that the index names: download it again.")
    entries = {tensor: parts[name].entries[tensor] for tensor, name in weight_map.items()}
    return Checkpoint(path, entries, tuple(folder / name for name in parts))


def _read_index(path: Path, index: Path) -> dict[str, str]:
    try:
        if index.stat().st_size > MAX_INDEX_BYTES:
            raise ValueError(f"{index.stat().st_size} bytes")
        weight_map = json.loads(index.read_bytes())["weight_map"]
        if not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
            raise ValueError("no table of files")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Refused(f"{INDEX} of {path.name} is damaged ({error}); download it again.") from None
    return dict(weight_map)
