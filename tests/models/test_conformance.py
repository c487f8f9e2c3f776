"""Every class of model that ComfyUI knows is declared, or docs/models.md says why not."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

from parallel_backend.models.declared import DECLARATIONS
from tests.comfy_oracle import comfy_on_path

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
ROW = re.compile(r"^\| `(\w+)` \| .+ \| (.+) \|$", re.MULTILINE)
DECLARED = re.compile(r"`(\w+)\.(\w+)`")
NOT_BY_DECLARATION = re.compile(r"no: .+|Load Parallel (CogVideoX|PixArt)")


@pytest.fixture(scope="module")
def rows() -> list[tuple[str, str]]:
    """The page's classes, and what it says of each."""
    return ROW.findall(PAGE.read_text(encoding="utf-8"))


def test_the_page_lists_comfyuis_classes_in_its_order(rows: list[tuple[str, str]]) -> None:
    comfy_on_path()
    from comfy.supported_models import models

    assert [kind for kind, _ in rows] == [model.__name__ for model in models]


def test_the_page_agrees_with_the_declarations(rows: list[tuple[str, str]]) -> None:
    declared = {}
    for kind, said in rows:
        if found := DECLARED.fullmatch(said):
            module, name = found.groups()
            declared[kind] = getattr(import_module(f"parallel_backend.models.declared.{module}"), name)
        else:
            assert NOT_BY_DECLARATION.fullmatch(said), kind
    assert declared == dict(DECLARATIONS)
    assert all(declared[kind] is DECLARATIONS[kind] for kind in declared)
