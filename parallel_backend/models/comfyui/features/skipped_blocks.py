"""Blocks that skip layer guidance leaves out of a model call, in a worker: ComfyUI's model has them replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

REPLACED = "patches_replace"
"""The option in which ComfyUI's models find what stands in for a block, by kind and place."""


def replacements(blocks: Iterable[Sequence[Any]]) -> dict[str, dict[tuple[Any, ...], Callable[[Any, Any], Any]]]:
    """What leaves these blocks out; each is its kind and number."""
    return {"dit": {tuple(block): _arguments for block in blocks}}


def _arguments(arguments: Any, _: Any) -> Any:
    """In the place of a block: what it was given."""
    return arguments
