"""Small models of ComfyUI's own classes, each with one call: what proofs on a user's machine and tests run."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .case import Builder, Case, Small
from .often_used import OFTEN_USED
from .pictures import PICTURES
from .sound import SOUND
from .videos import VIDEOS
from .wan import WAN

__all__ = ["OFTEN_USED", "PICTURES", "SMALL", "SOUND", "VIDEOS", "WAN", "Builder", "Case", "small"]

SMALL: Mapping[str, Small] = MappingProxyType({**OFTEN_USED, **PICTURES, **VIDEOS, **WAN, **SOUND})


def small(name: str, builder: Builder = Builder()) -> Case:  # noqa: B008 (frozen)
    """A small model, and one call of it."""
    return SMALL[name](builder)
