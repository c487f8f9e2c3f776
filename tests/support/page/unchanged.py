"""The tests in the browser, which the quick run leaves out while nothing that the page depends on has changed since they passed.

    python -m tests.support.page.unchanged

records that they passed with the present files. scripts/test.sh does so after a quick run; commit the file with your change.
"""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

import pytest

from scripts.comfyui import REPO

WATCHED = (
    "web",
    "locales",
    "workflows",
    "nodes",
    *(f"parallel_backend/{folder}" for folder in ("bench", "doctor", "host", "plan")),
    "tests/page",
    "tests/support/page",
)
"""Folders of what the page shows, of what answers it or writes its sentences, and of its tests."""

FRONT_END = ("comfyui-frontend-package", "comfyui-workflow-templates")
"""ComfyUI's own packages of its page."""

PASSED = "tests/page/passed.txt"
"""The file with the digest of what the tests in the browser last passed with."""

BROWSER = {"chromium", "page"}
"""Fixtures of the tests in the browser."""

always = pytest.mark.always
"""Marks a test in the browser that every quick run has: a run from the page to the workers and back."""


def digest(root: Path) -> str:
    """Return the digest of all files and packages that the page depends on."""
    whole = hashlib.sha256(repr([(name, metadata.version(name)) for name in FRONT_END]).encode())
    for folder in WATCHED:
        for path in sorted((root / folder).rglob("*")):
            name = path.relative_to(root)
            if path.is_file() and "__pycache__" not in name.parts and name != Path(PASSED):
                whole.update(repr((name.as_posix(), hashlib.sha256(path.read_bytes()).hexdigest())).encode())
    return whole.hexdigest()


def is_unchanged(root: Path) -> bool:
    """Return True if the tests in the browser have passed with all files and packages as they are."""
    return (root / PASSED).read_text(encoding="utf-8").split()[-1:] == [digest(root)]


def needs_the_browser(item: pytest.Item) -> bool:
    """Return True for a test in the browser that not every quick run has."""
    fixtures = getattr(item, "fixturenames", ())
    return not BROWSER.isdisjoint(fixtures) and item.get_closest_marker(always.name) is None


def main() -> None:
    """Write down the digest of the present files."""
    if not is_unchanged(REPO):
        (REPO / PASSED).write_text(digest(REPO) + "\n", encoding="utf-8")
        print(f"The page's tests have passed: commit {PASSED} with your change.")


if __name__ == "__main__":
    main()
