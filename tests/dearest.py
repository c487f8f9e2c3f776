"""The dearest tests of the last run, as a page: seconds by group, by file and by test.

python -m tests.dearest
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import pytest

from parallel_backend import markdown
from scripts.comfyui import REPO
from tests.support.side_by_side import group

CACHED = "durations of the last run"
"""The name in pytest's cache under which a run leaves the seconds of each test."""


def durations_of(reports: Iterable[pytest.TestReport]) -> dict[str, float]:
    """Return the seconds of each test by its id: set-up, call and teardown together."""
    seconds: Counter[str] = Counter()
    for report in reports:
        seconds[report.nodeid] += report.duration  # type: ignore[assignment]
    return dict(seconds)


def page(durations: Mapping[str, float]) -> str:
    """Return the page: three tables of the dearest groups, files and tests, each with its part of all seconds."""
    total = sum(durations.values())
    kinds: Mapping[str, Callable[[str], str]] = {
        "group": group,
        "file": lambda test: test.partition("::")[0],
        "test": lambda test: f"`{test}`",
    }
    tables = [_table(kind, name_of, durations, total) for kind, name_of in kinds.items()]
    return f"{len(durations)} tests took {total:.0f} s together.\n\n" + "\n".join(tables)


def _table(kind: str, name_of: Callable[[str], str], durations: Mapping[str, float], total: float) -> str:
    seconds: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for test, duration in durations.items():
        seconds[name_of(test)] += duration  # type: ignore[assignment]
        tests[name_of(test)] += 1
    rows = [
        (name, str(tests[name]), f"{taken:.1f}", f"{100 * taken / total:.1f} %")
        for name, taken in seconds.most_common(20)
    ]
    return markdown.table((kind, "tests", "s", "of all"), rows)


if __name__ == "__main__":
    file = REPO / ".pytest_cache" / "v" / CACHED
    if not file.exists():
        sys.exit("No run of the tests has left durations here: run bash scripts/test.sh first.")
    print(page(json.loads(file.read_text(encoding="utf-8"))), end="")
