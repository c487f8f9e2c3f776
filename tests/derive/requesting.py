"""The inputs of a derivation request, and its time limit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallel_backend.derive.call_kind import kind_of
from parallel_backend.derive.calls import ByClass, Sizes
from parallel_backend.derive.prompt import PromptExample
from parallel_backend.derive.small import small_of
from parallel_backend.models.comfyui.importing import import_comfyui
from tests.support.tiny.comfyui import TINY
from tests.support.tiny.models import draw

NAME = "causal_wan"
LIMIT = 4e9
SECONDS = 120.0


def prompt_of(file: Path, tokens: int, **more: Any) -> PromptExample:
    """Return a prompt's call as ComfyUI makes it for the file's class, in the tests' own size."""
    import_comfyui()
    shape = TINY[NAME].latent
    given: Mapping[str, Any] = {"cross_attn": draw(1, tokens, TINY[NAME].text, seed=tokens), **more}
    base = ByClass(small_of(file, LIMIT).base)
    sizes = Sizes(tuple(shape[1:]), tokens)
    return PromptExample(given, (1, *shape), kind_of(base.latent(sizes), base.conditioning(sizes, given)))
