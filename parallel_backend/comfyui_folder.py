"""Where workers find ComfyUI, as environment variables tell them, and which version lies there. Nothing of it is run."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = "PARALLEL_COMFYUI"
"""Environment variable: ComfyUI's folder."""

ARGUMENTS = "PARALLEL_COMFYUI_ARGUMENTS"
"""Environment variable: ComfyUI's command line, as JSON; its switches (precision, attention) are the host's."""

VERSION = re.compile(r"^__version__ = \"(.+)\"$", re.MULTILINE)


def comfyui_version(folder: str) -> str:
    """The version of the ComfyUI in a folder, read without running any of it; empty if it does not say."""
    try:
        match = VERSION.search(Path(folder, "comfyui_version.py").read_text())
    except OSError:
        return ""
    return match[1] if match else ""
