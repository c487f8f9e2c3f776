"""Imports modules of the nodes in a test's process, without ComfyUI."""

from __future__ import annotations

import importlib
import sys
from collections.abc import MutableMapping
from pathlib import Path
from types import ModuleType
from typing import Protocol

REPO = Path(__file__).parents[2]


class Sets(Protocol):
    """An object that puts modules into a table, as pytest's MonkeyPatch does."""

    def setitem(self, dic: MutableMapping[str, ModuleType], name: str, value: ModuleType) -> None:
        """Set `dic[name]` to `value`."""


class ForGood:
    """A patch that is never undone."""

    def setitem(self, dic: MutableMapping[str, ModuleType], name: str, value: ModuleType) -> None:
        """Set `dic[name]` to `value`."""
        dic[name] = value


def nodes_module(name: str, patch: Sets) -> ModuleType:
    """Import a module of the nodes without their package, which would import all of ComfyUI.

    The module uses this process's `parallel_backend`.
    """
    for package, path in (("pack", REPO), ("pack.nodes", REPO / "nodes")):
        patch.setitem(sys.modules, package, ModuleType(package))
        sys.modules[package].__path__ = [str(path)]
    for engine in [name for name in sys.modules if name == "parallel_backend" or name.startswith("parallel_backend.")]:
        patch.setitem(sys.modules, f"pack.{engine}", sys.modules[engine])
    return importlib.import_module(f"pack.nodes.{name}")
