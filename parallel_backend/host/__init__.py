"""The host, in ComfyUI's process: it starts the workers, talks to them, watches them and reports what happens."""

from .backend import Backend, Deadlines

__all__ = ["Backend", "Deadlines"]
