"""The choice of cases for the quick run and the complete one."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from scripts.comfyui import REPO
from tests.support.page import unchanged
from tests.support.selection import pairwise, product


@pytest.mark.parametrize("lengths", [(27, 4, 2, 3), (2, 3, 3), (1, 4)], ids=str)
def test_pairwise_cases_contain_every_two_values(lengths: tuple[int, ...]) -> None:
    values = {f"p{number}": range(length) for number, length in enumerate(lengths)}
    whole, some = ({case.values for case in mark(**values).args[1]} for mark in (product, pairwise))
    assert len(whole) >= len(some) and some <= whole
    for one, other in itertools.combinations(range(len(lengths)), 2):
        assert len({(case[one], case[other]) for case in some}) == lengths[one] * lengths[other]
    assert len(some) == max(one * other for one, other in itertools.combinations(lengths, 2)), "no more than it takes"


def test_the_quick_run_has_the_same_cases_of_product_and_pairwise() -> None:
    values = {"sampler": ("a", "b", "c"), "scheduler": {"one": 1, "two": 2}, "plan": (1, 2)}
    quick = [{case.id for case in mark(**values).args[1] if not case.marks} for mark in (product, pairwise)]
    assert quick[0] == quick[1] == {"a-one-1", "b-two-2", "c-one-1"}


@pytest.mark.parametrize(
    "file",
    [
        "web/swap/found.js",
        "nodes/routes/panel.py",
        "parallel_backend/plan/resolve.py",
        "tests/page/test_swap.py",
        "docs/any.md",
    ],
)
def test_the_page_is_unchanged_until_a_file_that_it_depends_on_changes(tmp_path: Path, file: str) -> None:
    (tmp_path / unchanged.PASSED).parent.mkdir(parents=True)
    changed = tmp_path / file
    changed.parent.mkdir(parents=True, exist_ok=True)
    changed.write_text("before")
    (tmp_path / unchanged.PASSED).write_text("never\n")
    assert not unchanged.is_unchanged(tmp_path)
    (tmp_path / unchanged.PASSED).write_text(unchanged.digest(tmp_path) + "\n")
    assert unchanged.is_unchanged(tmp_path)
    changed.write_text("after")
    assert unchanged.is_unchanged(tmp_path) == file.startswith("docs")


def test_the_page_has_changed_with_another_front_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(any((REPO / folder).iterdir()) for folder in unchanged.WATCHED)
    before = unchanged.digest(tmp_path)
    monkeypatch.setattr(unchanged.metadata, "version", lambda name: f"{name} 0")
    assert unchanged.digest(tmp_path) != before


def test_the_readmes_table_names_every_test_module() -> None:
    tests = Path(__file__).parents[1]
    page = (tests / "README.md").read_text()
    modules = [path.relative_to(tests).with_suffix("") for path in tests.rglob("test_*.py")]
    assert len(modules) > 200
    assert unnamed(page, modules) == []
    assert unnamed(page.replace("`pack/test_selection`", ""), modules) == ["pack/test_selection"]


def unnamed(page: str, modules: list[Path]) -> list[str]:
    """Return the modules that have no row in the table of a page, nor their folder."""
    named: set[str] = set()
    for line in page.splitlines():
        if row := re.match(r"\| (`[^`]+`(, `[^`]+`)*) \|", line):
            first, *others = re.findall("`([^`]+)`", row[1])
            folder = first.rpartition("/")[0]
            named |= {first, *others} | {f"{folder}/{other}" for other in others if folder}
    return [str(module) for module in modules if named.isdisjoint({str(module), str(module.parent)})]
