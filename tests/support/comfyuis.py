"""ComfyUI versions from 0.30 on: the version under test, and the things that only newer versions have."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Collection
from pathlib import Path

import pytest

from scripts.tested import comfyui_name

LISTED = (0, 30)
"""The ComfyUI version whose classes, nodes and templates the documentation lists in full (scripts/setup.sh)."""


class NewInComfyUI(UserWarning):
    """A warning that this newer ComfyUI has things that no page lists yet. pytest shows it at the end; no test fails."""


def name() -> str:
    """Return the version of the ComfyUI that COMFYUI_PATH names."""
    return comfyui_name(Path(os.environ["COMFYUI_PATH"]))


def is_listed() -> bool:
    """Return True if this is the ComfyUI that the pages list, so that their lists have to be complete."""
    found = re.match(r"(\d+)\.(\d+)", name())
    return found is not None and (int(found[1]), int(found[2])) == LISTED


def only_in_newer(what: str, there: bool) -> None:
    """Skip a test of something that this ComfyUI does not have.

    The skip is expected on the listed ComfyUI or an older one. On a newer ComfyUI, the reason shows that the thing was removed.
    """
    if not there:
        pytest.skip(f"ComfyUI {name()} has no {what}")


def tell_new(kind: str, found: Collection[str]) -> None:
    """Warn of things that no page lists yet; `kind` names them, for example `classes of models`.

    Raises:
        AssertionError: this is the ComfyUI that the pages list.
    """
    if not found:
        return
    said = f"{kind} that no page lists: {', '.join(sorted(found))}"
    assert not is_listed(), said
    warnings.warn(NewInComfyUI(f"ComfyUI {name()} has {said}"), stacklevel=2)
