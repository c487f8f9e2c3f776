"""Declared classes of ComfyUI's that only newer ComfyUIs have."""

from __future__ import annotations

from parallel_backend.models.comfyui.small import Case, small
from parallel_backend.models.comfyui.small.kinds import all_cases
from tests.support.comfy_oracle import comfy_on_path
from tests.support.comfyuis import only_in_newer

NEWER = {"WAN_Animate2": "0.31", "QwenImage21": "0.37"}
"""And since which they are there."""


def lacks(kind: str) -> bool:
    """Whether a class is one of these and this ComfyUI older."""
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
    """Return a small model with its call; skips where this ComfyUI is too old for its class."""
    only_where_small(name)
    return small(name)


def lacking() -> frozenset[str]:
    """The names of small models that this ComfyUI is too old for."""
    return frozenset(name for kind in NEWER if lacks(kind) for name in all_cases(kind))
