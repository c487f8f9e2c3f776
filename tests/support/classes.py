"""Declared classes of models that only newer ComfyUI versions have."""

from __future__ import annotations

from parallel_backend.models.comfyui.small import Case, small
from parallel_backend.models.comfyui.small.kinds import all_cases
from tests.support.comfy_oracle import comfy_on_path
from tests.support.comfyuis import only_in_newer

NEWER = {"WAN_Animate2": "0.31", "QwenImage21": "0.37"}
"""The class names, with the ComfyUI version that introduced each."""


def lacks(kind: str) -> bool:
    """Return True if `kind` is in `NEWER` and this ComfyUI is too old to have it."""
    comfy_on_path()
    import comfy.supported_models

    return kind in NEWER and not hasattr(comfy.supported_models, kind)


def only_where_declared(kind: str) -> None:
    """Skip a test of a class that this ComfyUI is too old for."""
    only_in_newer(f"{kind} (new in {NEWER.get(kind)})", not lacks(kind))


def only_where_small(name: str) -> None:
    """Skip a test of a small model whose class this ComfyUI is too old for."""
    for kind in NEWER:
        if name in all_cases(kind):
            only_where_declared(kind)


def small_or_skipped(name: str) -> Case:
    """Return a small model with its call. Skip the test if this ComfyUI is too old for the model's class."""
    only_where_small(name)
    return small(name)


def lacking() -> frozenset[str]:
    """Return the names of the small models that this ComfyUI is too old for."""
    return frozenset(name for kind in NEWER if lacks(kind) for name in all_cases(kind))
