"""Search for this machine's copy of a model file, which ComfyUI names by its own path and by a digest of its content."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path, PurePosixPath

import msgspec

from ...diffusion import ModelSpec
from ...errors import Refused
from ...weights.files.checkpoint import read_header
from ...weights.files.digest import Digests


class ModelFiles:
    """The model files of one machine.

    Args:
        folders: the folders to search, with their subfolders; empty if ComfyUI's own paths are valid on this machine.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._digests = Digests()
        self._known: dict[str, tuple[Path, ...]] = {}

    def find(self, model: ModelSpec) -> ModelSpec:
        """Return the model with the path of this machine's file of the same content. Files of the same name come first.

        A file with the path, time and size of ComfyUI's file is not read for this. A model without a digest, on ComfyUI's
        machine, is not read either.

        Raises:
            Refused: there is no such file. The message names the file and this machine.
        """
        if model.text is not None:
            text = msgspec.structs.replace(model.text, further=tuple(map(self.find, model.text.further)))
            model = msgspec.structs.replace(model, text=text)
        if not self._folders and (not model.digest or _is_there(model)):
            return model
        requested = PurePosixPath(model.path)
        same_name = ""
        known = (
            self._known.get(model.digest, ()) if self._folders else ()
        )  # without folders, the path selects one of several equal files
        for candidate in chain(known, self._candidates(requested)):
            try:
                if self._digests.of(candidate) == model.digest:
                    self._known[model.digest] = (candidate,)
                    return msgspec.structs.replace(model, path=str(candidate))
            except OSError:
                continue  # the file does not exist, or cannot be read
            if candidate.name == requested.name:
                same_name = f" ({candidate} has the same name and other contents)"
        where = " or ".join(map(str, self._folders)) or str(requested.parent)
        raise Refused(
            f"{requested.name} is not on {socket.gethostname()}{same_name}: copy ComfyUI's file into {where} there."
        )

    def _candidates(self, requested: PurePosixPath) -> Iterator[Path]:
        if not self._folders:
            yield Path(requested)
            return
        paths = [
            Path(directory, name)
            for folder in self._folders
            for directory, folders, files in os.walk(folder)
            for name in (*folders, *files)
        ]
        yield from (file for file in paths if file.name == requested.name)
        yield from (file for file in paths if file.name != requested.name and file.suffix == requested.suffix != "")


def _is_there(model: ModelSpec) -> bool:
    try:
        return read_header(model.path).fingerprint() == (model.modified, model.size)
    except (Refused, OSError):
        return False
