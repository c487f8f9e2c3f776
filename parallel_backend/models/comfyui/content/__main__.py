"""`python -m parallel_backend.models.comfyui.content FOLDER [--version NAME] [--read]`: write the table of a ComfyUI."""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path

import msgspec

from ....comfyui_folder import FOLDER, comfyui_version
from ..importing import import_comfyui
from ..small import SMALL, Builder, small_model
from ..small.kinds import KINDS, all_cases
from .known import write
from .model_code import sources_of
from .replaced_functions import REPLACED_FUNCTIONS
from .source_digests import SourceDigestCheck


def main() -> None:
    """Import the ComfyUI of a folder, and write the table of its replaced functions."""
    parser = argparse.ArgumentParser(prog="python -m parallel_backend.models.comfyui.content", description=__doc__)
    parser.add_argument("folder", type=Path, help="a ComfyUI that the tests ran against")
    parser.add_argument("--version", default="", help="the name of the table (default: the version in the folder)")
    parser.add_argument(
        "--read", action="store_true", help="no test ran against this version; someone read the changes instead"
    )
    options = parser.parse_args()
    folder = options.folder.resolve()
    import_comfyui({**os.environ, FOLDER: str(folder)})
    for name in sorted({function.module for function in REPLACED_FUNCTIONS}):
        importlib.import_module(name)
    content_table = SourceDigestCheck(folder, ()).table(
        options.version or comfyui_version(str(folder)), "read" if options.read else "tested"
    )
    table = msgspec.structs.replace(
        content_table, files=dict(sorted({**content_table.files, **_sources(folder)}.items()))
    )
    counts = len(table.replaced), len(table.functions), len(table.files)
    print(f"{write(table)}: {counts[0]} replaced functions, which call {counts[1]} functions; {counts[2]} files")


def _sources(folder: Path) -> dict[str, str]:
    """Return the files of the declared models that this ComfyUI has, with their digests."""
    classes, on_meta = importlib.import_module("comfy.supported_models"), Builder(device="meta")
    lacking = {name for kind in KINDS if not hasattr(classes, kind) for name in all_cases(kind)}
    return {
        path: digest
        for name in SMALL.keys() - lacking
        for path, digest in sources_of(small_model(name, on_meta), folder)
    }


if __name__ == "__main__":
    main()
