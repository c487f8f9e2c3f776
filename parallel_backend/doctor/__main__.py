"""The command `python -m parallel_backend.doctor [--models] [--json]`. Its exit code is 0, or 1 if something does not work."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import msgspec

from ..comfyui_folder import FOLDER
from . import diagnose, diagnose_models
from .findings import failed, table

CUSTOM_NODES = Path(__file__).resolve().parents[3]
"""ComfyUI's folder `custom_nodes`, if this pack is installed there."""


def comfyui() -> str:
    """Return ComfyUI's folder: the environment's, or else the folder around this pack."""
    return os.environ.get(FOLDER, str(CUSTOM_NODES.parent))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m parallel_backend.doctor", description="Check this machine, with a remedy for each problem."
    )
    parser.add_argument("--models", action="store_true", help="check ComfyUI's model classes on small models instead")
    parser.add_argument("--comfyui", default=comfyui(), help="ComfyUI's folder, for --models (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    arguments = parser.parse_args()
    if arguments.models and not Path(arguments.comfyui, "comfy").is_dir():
        parser.error(f"{arguments.comfyui} is not ComfyUI's folder: name it with --comfyui")
    findings = (
        diagnose_models(arguments.comfyui, lambda what: print(what, file=sys.stderr))
        if arguments.models
        else diagnose()
    )
    print(msgspec.json.encode(findings).decode() if arguments.json else table(findings))
    sys.exit(failed(findings))
