"""The table in the README of what was tested with what and when: a run writes its row (`scripts/test.sh --record`)."""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from importlib.metadata import version
from pathlib import Path

from parallel_backend import markdown

BEGIN = "<!-- Written by scripts/test.sh --record -->\n"
END = "<!-- The end of what it writes -->\n"
HEAD = ("ComfyUI", "torch", "Python", "run", "result", "day")
OUTCOMES = ("passed", "failed", "error", "skipped")
"""What pytest calls what becomes of tests, in the order in which a row says it."""


@dataclass(frozen=True)
class Row:
    """What a run was of and what it came to, in the table's words. A run of the same takes the place of an older one."""

    comfyui: str
    torch: str
    python: str
    run: str
    result: str
    day: str

    @property
    def of(self) -> tuple[str, ...]:
        """What no two rows have in common."""
        return self.comfyui, self.torch, self.python, self.run


def row(comfyui: Path, run: str, counts: Mapping[str, int], day: str) -> Row:
    """The row of a run in this environment.

    Args:
        comfyui: ComfyUI's folder.
        counts: of tests by OUTCOMES.
        day: as 2026-11-24.
    """
    result = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts.get(outcome))
    python = ".".join(platform.python_version_tuple()[:2])
    return Row(comfyui_name(comfyui), version("torch"), python, run, result or "no test", day)


def comfyui_name(folder: Path) -> str:
    """ComfyUI's version; of a checkout also the day of its commit, because its version is that of the last release."""
    text = (folder / "comfyui_version.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    name = found[1] if found else "of no version"
    if (folder / ".git").exists():
        command = ["git", "-C", str(folder), "log", "-1", "--format=%cs"]
        name += f", commit of {subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()}"
    return name


def rows_of(page: str) -> list[Row]:
    """The rows of a page's table. Raises ValueError where it has none, or a row of another width."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError("the page has no place for the table of what was tested")
    lines = page.partition(BEGIN)[2].partition(END)[0].splitlines()
    rows = []
    for line in lines[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != len(HEAD):
            raise ValueError(f"the table of what was tested has a row of {len(cells)} cells: {line}")
        rows.append(Row(*cells))
    return rows


def written(page: str, new: Row) -> str:
    """A page with one more row in its table, in place of that of an older run of the same; sorted."""
    rows = sorted([*(each for each in rows_of(page) if each.of != new.of), new], key=_order)
    table = markdown.table(HEAD, map(astuple, rows))
    return page.partition(BEGIN)[0] + BEGIN + table + END + page.partition(END)[2]


def _order(each: Row) -> tuple[object, ...]:
    """Numbers in the versions count as numbers."""
    return tuple([int(part) if part.isdigit() else -1 for part in re.split(r"(\d+)", text)] for text in each.of[:3])
