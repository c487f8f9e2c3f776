"""The one Backend of this ComfyUI process, the one who says what it tells, and what is known of other packs' samplers."""

from __future__ import annotations

import atexit
import functools
import os

from ..parallel_backend.host import Backend, Deadlines
from .model.recording.trial import Trials
from .progress import Progress

CATEGORY = "Parallel"


@functools.cache
def backend() -> Backend:
    """The Backend that all nodes share; its workers end with ComfyUI."""
    made = Backend(Deadlines.read(os.environ), progress().hear)
    atexit.register(made.close)
    return made


@functools.cache
def progress() -> Progress:
    """Who hears what that Backend tells."""
    return Progress()


@functools.cache
def trials() -> Trials:
    """What came of trying other packs' samplers."""
    return Trials()
