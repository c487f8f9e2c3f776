"""A copy of ComfyUI with one edited file, and the message with which it refuses a graph."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from parallel_backend.wire.handshake import VARIABLE
from scripts.comfyui import ComfyUI, Graph
from tests.support.graphs.comfyui import graph_of, save_families


def plain(steps: int = 3) -> Graph:
    return graph_of("wan", steps=steps)


def edit(copy: Path, file: str, before: str, after: str) -> None:
    """Replace `before` by `after` in a file of a copy of ComfyUI."""
    text = (copy / file).read_text()
    assert before in text, f"{file} of this ComfyUI has no {before!r}"
    (copy / file).write_text(text.replace(before, after, 1))


def copied(folder: Path, file: str, before: str, after: str, **variables: str) -> ComfyUI:
    """Copy ComfyUI into `folder / "ComfyUI"`, edit a file as `edit` does, and have a cache of verdicts for the copy alone."""
    copy = folder / "ComfyUI"
    shutil.copytree(os.environ["COMFYUI_PATH"], copy, ignore=shutil.ignore_patterns(".git", "__pycache__"))
    edit(copy, file, before, after)
    cache = {"XDG_CACHE_HOME": str(folder / "cache")}
    server = ComfyUI(copy, folder / "base", env={VARIABLE: str(folder / "secret"), **cache, **variables})
    save_families(server, "wan")
    return server


def said(server: ComfyUI, graph: Graph) -> str:
    """Return the message with which the server refuses a graph."""
    run = server.queue(graph, timeout=600)
    assert run.error is not None
    return run.error.exception_message
