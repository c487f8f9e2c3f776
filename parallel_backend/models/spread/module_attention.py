"""Attention that a block calls without transformer_options, through which ComfyUI lets another answer."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
    found = sys.modules[module]
    own = getattr(found, NAME, None)
    if own is None:
        raise Refused(
            f"the model's {module} has no {NAME}: this ComfyUI is newer or older than this pack knows; update the pack, or use "
            "Load Diffusion Model."
        )
    setattr(found, NAME, functools.partial(own, transformer_options={OVERRIDE: attentions}))
    try:
        yield
    finally:
        setattr(found, NAME, own)
