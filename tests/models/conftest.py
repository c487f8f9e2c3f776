"""Sorts the tests of models by case."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.comfy_oracle import comfy_on_path

comfy_on_path()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests of the same case one after another, so that the case is made once and no other case is held meanwhile.

    Tests of no case or of several follow. The ranks that they fork inherit the sources of classes that this process has read.
    """
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    places = [index for index, item in enumerate(items) if item in here]
    for index, item in zip(places, sorted(here, key=_case), strict=True):
        items[index] = item


def _case(item: pytest.Item) -> tuple[Path, bool, str]:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return item.path, "name" not in parameters, str(parameters.get("name", ""))
