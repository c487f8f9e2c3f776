"""The one Backend of this ComfyUI process, and the listener that shows its events."""

from __future__ import annotations

import atexit
import functools
import os

from ..parallel_backend.host import Backend, Deadlines
from .progress import NodeProgress

CATEGORY = "Parallel"


@functools.cache
def backend() -> Backend:
    """Return the Backend that all nodes share. Its workers end with ComfyUI."""
    shared = Backend(Deadlines.read(os.environ), progress().hear)
    atexit.register(shared.close)
    return shared


@functools.cache
def progress() -> NodeProgress:
    """Return the listener that shows the Backend's events on the nodes."""
    return NodeProgress()
