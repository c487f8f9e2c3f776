"""The check of a graph's loaders: the file's header says whether this pack's loader can replace a loader."""

from __future__ import annotations

from typing import Annotated

import folder_paths
import msgspec
from aiohttp import web

from ...parallel_backend.errors import Refused
from ...parallel_backend.vae import recognise
from ...parallel_backend.weights.files.checkpoint import read_header
from ..load_vae import FOLDER
from ..model.build import judge_model
from ..model.checkpoint import refuse_another_class
from ..model.files import CHECKPOINTS, path_of
from .body import Name, check_name
from .route import as_json


class Loader(msgspec.Struct, frozen=True):
    """A loader node of ComfyUI's, or of a pack that loads GGUF files, and its file."""

    kind: str
    file: Name

    def __post_init__(self) -> None:
        """Raise ValueError for an invalid file name."""
        check_name(self.file)


LoaderList = Annotated[list[Loader], msgspec.Meta(max_length=1000)]
"""The loaders of a graph. The route reads the header of every loader's file, so their number is limited."""


def judge_loaders(loaders: list[Loader]) -> web.Response:
    """Reply with the reason why each loader must stay, in a sentence; empty if this pack can run its file. Load nothing."""
    whys = {loader: why_not(loader) for loader in set(loaders)}
    return as_json([whys[loader] for loader in loaders])


def why_not(loader: Loader) -> str:
    """Return the reason why a loader must stay, in a sentence; empty if this pack can run its file."""
    try:
        match loader.kind:
            case "UNETLoader" | "UnetLoaderGGUF":
                judge_model(path_of(loader.file))
            case "CheckpointLoaderSimple":
                path = path_of(f"{CHECKPOINTS}/{loader.file}")
                refuse_another_class(read_header(path), judge_model(path))
            case "VAELoader":
                path = folder_paths.get_full_path(FOLDER, loader.file)
                if path is None:
                    return f"{loader.file} is not a file in models/{FOLDER}: download it, or pick another."
                recognise(read_header(path))
            case kind:
                return f"this pack has no loader to replace {kind}."
    except Refused as refusal:
        return str(refusal)
    return ""
