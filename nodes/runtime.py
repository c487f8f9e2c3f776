"""The one Backend of this ComfyUI process."""

from __future__ import annotations

import atexit
import functools
import os

from ..parallel_backend.host import Backend, Deadlines

CATEGORY = "Parallel"


@functools.cache
def backend() -> Backend:
    """The Backend that all nodes share; its workers end with ComfyUI."""
    made = Backend(Deadlines.read(os.environ))
    atexit.register(made.close)
    return made
