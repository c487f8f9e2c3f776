"""Every model class of ComfyUI is declared, or docs/guide/models.md says why it is not.

The page lists all classes of one ComfyUI, and marks classes that only newer versions have. Classes of a still newer ComfyUI are
reported and fail no test: a file of an undeclared class is refused by the name of its class.
"""

from __future__ import annotations

import re
from importlib import import_module

import pytest

from parallel_backend.models.declared import DECLARATIONS
from tests.models.page import NEWER, PAGE, ROW
from tests.support.comfyuis import is_listed, tell_new

# isort: split
from comfy.supported_models import models

DECLARED = re.compile(r"`(\w+)\.(\w+)`")
NOT_BY_DECLARATION = re.compile(r"(no|unsharded): .+|unsharded|Load Parallel (CogVideoX|PixArt)")


@pytest.fixture(scope="module")
def rows() -> list[tuple[str, str, str]]:
    """Return the page's rows: class, models, and support."""
    found = ROW.findall(PAGE.read_text(encoding="utf-8"))
    assert len(found) > 70
    return found


def test_the_page_lists_comfyuis_classes_in_its_order(rows: list[tuple[str, str, str]]) -> None:
    there = [model.__name__ for model in models]
    page = [kind for kind, _, _ in rows]
    assert [kind for kind in page if kind in there] == [kind for kind in there if kind in page]
    if is_listed():
        marked = {kind for kind, said, _ in rows if NEWER.search(said)}
        assert set(page) - set(there) == marked
    tell_new("classes of models", set(there) - set(page))


def test_the_page_agrees_with_the_declarations(rows: list[tuple[str, str, str]]) -> None:
    declared = {}
    for kind, _, said in rows:
        if found := DECLARED.fullmatch(said):
            module, name = found.groups()
            declared[kind] = getattr(import_module(f"parallel_backend.models.declared.{module}"), name)
        else:
            assert NOT_BY_DECLARATION.fullmatch(said), kind
    assert declared == dict(DECLARATIONS)
    assert all(declared[kind] is DECLARATIONS[kind] for kind in declared)
