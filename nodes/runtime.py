"""The one Backend of this ComfyUI process."""

from __future__ import annotations

import atexit
import functools

from ..parallel_backend.host import Backend

CATEGORY = "Parallel"


@functools.cache
def backend() -> Backend:
    """The Backend that all nodes share; its workers end with ComfyUI."""
    made = Backend()
    atexit.register(made.close)
    return made
