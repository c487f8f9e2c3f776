"""The environment variables that tell workers where ComfyUI is, and its version. No code of ComfyUI runs here."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = "PARALLEL_COMFYUI"
"""Name of the environment variable with ComfyUI's folder."""

ARGUMENTS = "PARALLEL_COMFYUI_ARGUMENTS"
"""Name of the environment variable with ComfyUI's command line as JSON: the host's switches (precision, attention)."""

VERSION = re.compile(r"^__version__ = \"(.+)\"$", re.MULTILINE)


def comfyui_version(folder: str) -> str:
    """Return the version of the ComfyUI in a folder, read without running its code; empty if no file states the version."""
    try:
        match = VERSION.search(Path(folder, "comfyui_version.py").read_text())
    except OSError:
        return ""
    return match[1] if match else ""
