"""ComfyUIs from 0.30 on: which one the tests have, and what only newer ones have."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Collection
from pathlib import Path

import pytest

from scripts.tested import comfyui_name

LISTED = (0, 30)
"""The ComfyUI whose classes, nodes and templates the pages of the documentation list in full (scripts/setup.sh)."""


class NewInComfyUI(UserWarning):
    """What no page lists yet, because this ComfyUI is newer: told at the end of a run, and no failure."""


def name() -> str:
    """The ComfyUI that COMFYUI_PATH names, by its version."""
    return comfyui_name(Path(os.environ["COMFYUI_PATH"]))


def is_listed() -> bool:
    """Whether this is the ComfyUI of the pages, whose lists then have to be complete."""
    found = re.match(r"(\d+)\.(\d+)", name())
    return found is not None and (int(found[1]), int(found[2])) == LISTED


def only_in_newer(what: str, there: bool) -> None:
    """Skip a test of what this ComfyUI has not. Where it is the one of the pages or older, that is no surprise; in a newer one it
    has gone, which is told as well.
    """
    if not there:
        pytest.skip(f"ComfyUI {name()} has no {what}")


def tell_new(kind: str, found: Collection[str]) -> None:
    """Tell what is new, by kind, as `classes of models`. Raises AssertionError on the ComfyUI that the pages list."""
    if not found:
        return
    said = f"{kind} that no page lists: {', '.join(sorted(found))}"
    assert not is_listed(), said
    warnings.warn(NewInComfyUI(f"ComfyUI {name()} has {said}"), stacklevel=2)
