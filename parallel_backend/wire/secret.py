"""The secret that ComfyUI and workers on other machines share: a file that its owner alone can read."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from ..errors import Refused

VARIABLE = "PARALLEL_SECRET_FILE"
MIN_BYTES = 16
MAX_BYTES = 4096


def secret_path(variables: Mapping[str, str], option: str | None = None) -> Path:
    """Return the file of the option, else of the environment, else ~/.config/comfyui-parallel/secret."""
    return Path(option or variables.get(VARIABLE) or Path.home() / ".config" / "comfyui-parallel" / "secret")


def read_secret(path: Path) -> bytes:
    """Return the secret in a file, without white space around the secret.

    Raises:
        Refused: no such file, others can read it, or it is too short.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            text = file.read(MAX_BYTES + 1).strip()
    except OSError as error:
        raise Refused(
            f"the secret of the workers on other machines cannot be read from {path} ({error.strerror}): copy the file "
            f"there that the workers were started with, or name it in {VARIABLE}."
        ) from None
    if stat.S_IMODE(status.st_mode) & 0o077 or status.st_uid != os.geteuid():
        raise Refused(f"{path} holds a secret and is not its owner's alone: run chmod 600 on it, and own it.")
    if not MIN_BYTES <= len(text) <= MAX_BYTES:
        raise Refused(
            f"{path} holds {len(text)} bytes and a secret has {MIN_BYTES} to {MAX_BYTES}: make one with "
            f"head -c 32 /dev/urandom | base64."
        )
    return text
