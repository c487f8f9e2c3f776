"""ComfyUI's description of this pack."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.comfyui import ComfyUI
from tests.support.page.browser import PACK

Info = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def all_nodes(comfyui: ComfyUI) -> Info:
    """Provide ComfyUI's description of each node, by name."""
    every: Info = comfyui.get("/object_info")
    return every


@pytest.fixture(scope="module")
def info(all_nodes: Info) -> Info:
    """Provide ComfyUI's description of each of the pack's nodes, by name."""
    return {name: node for name, node in all_nodes.items() if node["python_module"] == f"custom_nodes.{PACK}"}
