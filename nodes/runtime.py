"""The one Backend of this ComfyUI process, and the one who says what it tells."""

from __future__ import annotations

import atexit
import functools
import os

from ..parallel_backend.host import Backend, Deadlines
from .progress import NodeProgress

CATEGORY = "Parallel"


@functools.cache
def backend() -> Backend:
    """Return the Backend that all nodes share; its workers end with ComfyUI."""
    shared = Backend(Deadlines.read(os.environ), progress().hear)
    atexit.register(shared.close)
    return shared


@functools.cache
def progress() -> NodeProgress:
    """Who hears what that Backend tells."""
    return NodeProgress()
