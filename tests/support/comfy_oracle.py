"""ComfyUI as the oracle: how tests reach the one that COMFYUI_PATH names."""

from __future__ import annotations

import os
import sys

FOLDER = os.environ.get("COMFYUI_PATH", "")


def comfy_on_path() -> None:
    """Make ComfyUI's modules importable in this process and have them keep to the CPU.

    Raises RuntimeError if COMFYUI_PATH does not name ComfyUI's folder.
    """
    folder = FOLDER
    if not os.path.isdir(os.path.join(folder, "comfy")):
        raise RuntimeError(f"Set COMFYUI_PATH to ComfyUI's folder; it is {folder!r}.")
    if folder not in sys.path:
        # Last, because ComfyUI's folder has a `tests` and a `nodes` too.
        sys.path.append(folder)
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
