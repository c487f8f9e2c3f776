"""Names: no identifier that the glossary retired comes back, and every class has a name of its own."""

from __future__ import annotations

import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import pytest

from scripts.comfyui import REPO

GLOSSARY = REPO / "docs" / "develop" / "glossary.md"
FOLDERS = ("nodes", "parallel_backend", "tests", "scripts", "benchmarks")
PRODUCT = ("nodes", "parallel_backend")


def rows(page: str) -> list[list[str]]:
    """Return the cells of each row of the glossary's table, its heading left out."""
    lines = [line for line in page.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def retired_names(page: str) -> set[str]:
    """Return the identifiers of the glossary's last column."""
    return {name for row in rows(page) for name in re.findall(r"`(\w+)`", row[-1])}


def sources(folders: Iterable[str]) -> dict[str, str]:
    """Return the Python sources in these folders, by their path in the repository."""
    paths = [path for folder in folders for path in sorted((REPO / folder).rglob("*.py"))]
    return {path.relative_to(REPO).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def uses(files: Mapping[str, str], names: set[str]) -> list[str]:
    """Return file, line and name for each identifier that is one of `names`. Strings and comments do not count."""
    found = []
    some = re.compile(rf"\b({'|'.join(sorted(names))})\b")
    for path in (path for path, source in files.items() if some.search(source)):
        for token in tokenize.generate_tokens(io.StringIO(files[path]).readline):
            if token.type == tokenize.NAME and token.string in names:
                found.append(f"{path}:{token.start[0]}: {token.string}")
    return found


def repeated_classes(files: Mapping[str, str]) -> dict[str, Sequence[str]]:
    """Return the files of each class name that is defined more than once."""
    found = defaultdict(list)
    for path, source in files.items():
        for name in re.findall(r"^\s*class (\w+)[(:\[]", source, re.MULTILINE):
            found[name].append(path)
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def test_no_retired_name_comes_back() -> None:
    names, files = retired_names(GLOSSARY.read_text(encoding="utf-8")), sources(FOLDERS)
    assert len(names) > 30
    assert len(files) > 800
    assert uses(files, names) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("class Doorway:\n    pass\n", ["planted.py:1: Doorway"]),
        ("def run(plan):\n    wish = plan\n    return wish\n", ["planted.py:2: wish", "planted.py:3: wish"]),
        ('print(f"{1}", "a Doorway")  # wish\n', []),
    ],
)
def test_a_retired_name_is_found(source: str, found: list[str]) -> None:
    assert uses({"planted.py": source}, retired_names(GLOSSARY.read_text(encoding="utf-8"))) == found


def test_every_class_has_a_name_of_its_own() -> None:
    files = sources(PRODUCT)
    assert len(files) > 400
    assert repeated_classes(files) == {}


def test_a_repeated_class_name_is_found() -> None:
    planted = {
        "a.py": "class Answer:\n    pass\n",
        "b.py": "def f():\n    class Answer:\n        pass\n",
        "c.py": "Answer = 1\n",
    }
    assert repeated_classes(planted) == {"Answer": ["a.py", "b.py"]}


def test_the_glossary_has_at_most_fifty_rows_of_three_cells() -> None:
    table = rows(GLOSSARY.read_text(encoding="utf-8"))
    assert 30 < len(table) <= 50
    assert {len(row) for row in table} == {3}
