"""The ComfyUI of COMFYUI_PATH, which tests import as their oracle."""

from __future__ import annotations

import os
import sys

FOLDER = os.environ.get("COMFYUI_PATH", "")


def comfy_on_path() -> None:
    """Make ComfyUI's modules importable in this process and restrict them to the CPU.

    Raises:
        RuntimeError: COMFYUI_PATH does not name ComfyUI's folder.
    """
    folder = FOLDER
    if not os.path.isdir(os.path.join(folder, "comfy")):
        raise RuntimeError(f"Set COMFYUI_PATH to ComfyUI's folder; it is {folder!r}.")
    if folder not in sys.path:
        # Appended, not prepended: ComfyUI's folder has packages `tests` and `nodes` too.
        sys.path.append(folder)
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
