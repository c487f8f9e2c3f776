"""The nodes' modules in a test's process."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

REPO = Path(__file__).parents[1]


def nodes_module(name: str, patch: pytest.MonkeyPatch) -> ModuleType:
    """A module of the nodes, without what their package imports, which is a whole ComfyUI; on this process's engine."""
    for package, path in (("pack", REPO), ("pack.nodes", REPO / "nodes")):
        patch.setitem(sys.modules, package, ModuleType(package))
        sys.modules[package].__path__ = [str(path)]
    for engine in [name for name in sys.modules if name.partition(".")[0] == "parallel_backend"]:
        patch.setitem(sys.modules, f"pack.{engine}", sys.modules[engine])
    return importlib.import_module(f"pack.nodes.{name}")
