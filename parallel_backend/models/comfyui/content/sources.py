"""The files that a model's class consists of."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from .files import digest_of

MODELS = "comfy.ldm."
"""Where ComfyUI's model classes are, and what they are made of."""

AROUND = ("comfy/ldm/modules/attention.py", "comfy/model_base.py", "comfy/ops.py")
"""What takes part in every model's forward."""


def sources_of(model: Any, folder: Path) -> tuple[tuple[str, str], ...]:
    """The files of a model's modules, of all that these use under `comfy.ldm`, and of what is around, with their digests.

    Args:
        model: a diffusion model, on any device.
        folder: ComfyUI's.
    """
    kinds = {base for module in model.modules() for base in type(module).__mro__}
    begun = {kind.__module__ for kind in kinds if kind.__module__.startswith(MODELS)}
    paths = {path for name in _reached(begun) if (path := _path(name, folder))} | {*AROUND}
    return tuple((path, digest_of(folder / path)) for path in sorted(paths))


def _reached(begun: Iterable[str]) -> set[str]:
    reached, waiting = set(begun), [*begun]
    while waiting:
        module = sys.modules.get(waiting.pop())
        more = {*_used(module)} - reached if module is not None and module.__name__.startswith(MODELS) else set()
        reached |= more
        waiting += more
    return reached


def _used(module: ModuleType) -> Iterator[str]:
    for value in [*vars(module).values()]:
        name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(name, str) and name.startswith(MODELS):
            yield name


def _path(name: str, folder: Path) -> str:
    file = getattr(sys.modules.get(name), "__file__", None)
    return Path(file).relative_to(folder).as_posix() if file and file.startswith(f"{folder}/") else ""
