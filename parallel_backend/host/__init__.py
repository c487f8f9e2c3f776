"""Runs in ComfyUI's process: starts the workers, talks to them, watches them and reports what happens."""

from .backend import Backend, Deadlines

__all__ = ["Backend", "Deadlines"]
