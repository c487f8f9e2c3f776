"""Attention that a block calls without ComfyUI's transformer_options of the run, through which another may answer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ...errors import Refused
from .compiled import OVERRIDE

NAME = "optimized_attention"


@contextmanager
def answered(module: str, attentions: Callable[..., Tensor]) -> Iterator[None]:
    """While a block runs, have `attentions` answer what this module of ComfyUI's calls by that name; empty for none.

    Raises:
        Refused: it calls attention by another name.
    """
    if not module:
        yield
        return
    source_module = sys.modules[module]
    own = getattr(source_module, NAME, None)
    if own is None:
        raise Refused(
            f"the model's {module} has no {NAME}: this ComfyUI is newer or older than this pack knows; update the pack, or use "
            "Load Diffusion Model."
        )

    def call(*args: Any, transformer_options: Mapping[str, Any] | None = None, **kwargs: Any) -> Tensor:
        return own(*args, transformer_options={OVERRIDE: attentions, **(transformer_options or {})}, **kwargs)

    setattr(source_module, NAME, call)
    try:
        yield
    finally:
        setattr(source_module, NAME, own)
