"""The table of tested versions, and the README's line about it: what was tested with what, and when.

A test run writes its row (`scripts/test.sh --record`). `python -m scripts.tested REPORT` writes the row of a visit to a machine
with GPUs, from the report that `scripts/gpu.sh` makes there.
"""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from importlib.metadata import version
from pathlib import Path

import msgspec

from parallel_backend import markdown
from parallel_backend.errors import Refused
from parallel_backend.plan.gpu_report import BEGINNING, ReportLine, Versions, device_of, lines_of

REPO = Path(__file__).parents[1]
PAGE = "docs/measured/tested.md"
README = "README.md"

BEGIN = "<!-- Written by scripts/test.sh --record -->\n"
END = "<!-- The end of what it writes -->\n"
HEAD = ("ComfyUI", "torch", "Python", "run", "result", "day")
WHOLE = ("the quick run", "every test")
"""Beginnings of the names of runs that take tests of all folders."""

OUTCOMES = ("passed", "failed", "error", "skipped")
"""Outcomes of tests by pytest's names, in the order in which a row lists them."""


@dataclass(frozen=True)
class Row:
    """The versions and the result of a run, in the table's words.

    A new row replaces an older one with equal versions and run.
    """

    comfyui: str
    torch: str
    python: str
    run: str
    result: str
    day: str

    @property
    def of(self) -> tuple[str, ...]:
        """Return the cells that identify a row: no two rows share all of them."""
        return self.comfyui, self.torch, self.python, self.run


def versions(comfyui: Path, day: str) -> Versions:
    """Return the versions of ComfyUI, torch and Python in this environment.

    Args:
        comfyui: ComfyUI's folder.
        day: the date, for example 2026-11-24.
    """
    python = ".".join(platform.python_version_tuple()[:2])
    return Versions(comfyui_name(comfyui), version("torch"), python, day)


def row(of: Versions, run: str, counts: Mapping[str, int]) -> Row:
    """Return the row of a run. `counts` has the number of tests by outcome."""
    result = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts.get(outcome))
    return Row(of.comfyui, of.torch, of.python, run, result or "no test", of.day)


def row_of_report(lines: Sequence[ReportLine]) -> Row:
    """Return the row of a visit: its checks that passed and failed.

    The errors are the lists that began and never ended.

    Raises:
        Refused: the report is of several cards or versions, or does not name its versions.
    """
    versions_of_lists = [line.versions for line in lines if line.versions]
    if not versions_of_lists:
        raise Refused("the report has no versions: make it again with this version's scripts/gpu.sh.")
    days = sorted(each.day for each in versions_of_lists)
    of = {msgspec.structs.replace(each, day=days[-1]) for each in versions_of_lists}
    if len(of) > 1:
        names = "; ".join(sorted(f"ComfyUI {each.comfyui}, torch {each.torch}, Python {each.python}" for each in of))
        raise Refused(
            f"the report has lines of several versions ({names}): copy the lines of one to a file, and use that file."
        )
    verdicts = [line.verdict for line in lines]
    counts = {
        "passed": verdicts.count("PASS"),
        "failed": verdicts.count("FAIL"),
        "error": sum(line.name == BEGINNING for line in lines) - sum(line.end for line in lines),
    }
    lists = ", ".join(dict.fromkeys(line.checks for line in lines))
    return row(of.pop(), f"scripts/gpu.sh on {device_of(lines)}: {lists}", counts)


def comfyui_name(folder: Path) -> str:
    """Return ComfyUI's version. For a git checkout, add the day of its commit: its version is that of the last release."""
    text = (folder / "comfyui_version.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    name = found[1] if found else "of unknown version"
    if (folder / ".git").exists():
        command = ["git", "-C", str(folder), "log", "-1", "--format=%cs"]
        name += f", commit of {subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()}"
    return name


def rows_of(page: str) -> list[Row]:
    """Return the rows of a page's table.

    Raises:
        ValueError: the page has no table, or a row has another number of cells.
    """
    rows = []
    for line in _parts(page)[1].splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != len(HEAD):
            raise ValueError(
                f"the table of tested versions needs {len(HEAD)} cells in each row, and has {len(cells)} in: {line}"
            )
        rows.append(Row(*cells))
    return rows


def written(page: str, new: Row) -> str:
    """Return the page with one more row in its sorted table. The row replaces an older row of the same run."""
    rows = sorted([*(each for each in rows_of(page) if each.of != new.of), new], key=_order)
    before, _, after = _parts(page)
    return before + markdown.table(HEAD, map(astuple, rows)) + after


def in_words(rows: Sequence[Row]) -> str:
    """Return the README's line: the versions of runs without a failure, and the day of the last one."""
    good = sorted((row for row in rows if "failed" not in row.result and "error" not in row.result), key=_order)
    if not good:
        return "No run without a failure yet.\n"
    tested = []
    for comfyui in dict.fromkeys(row.comfyui for row in good):
        of = [row for row in good if row.comfyui == comfyui]
        whole = dict.fromkeys(row.torch for row in of if row.run.startswith(WHOLE))
        parts = dict.fromkeys(row.torch for row in of if row.torch not in whole)
        with_torch = [f"with torch {', '.join(whole)}"] * bool(whole)
        with_torch += [f"in part with torch {', '.join(parts)}"] * bool(parts)
        tested.append(f"ComfyUI {comfyui} {', '.join(with_torch)}")
    return f"{'; '.join(tested)}. The last run without a failure was on {max(row.day for row in good)}.\n"


def record(new: Row, repository: Path = REPO) -> None:
    """Write a row into the table's page, and the README's line anew."""
    page, readme = repository / PAGE, repository / README
    table = written(page.read_text(encoding="utf-8"), new)
    before, _, after = _parts(readme.read_text(encoding="utf-8"))
    page.write_text(table, encoding="utf-8")
    readme.write_text(before + in_words(rows_of(table)) + after, encoding="utf-8")


def _parts(page: str) -> tuple[str, str, str]:
    """Return the text to the end of the first comment, the text between the comments, and the text from the second one.

    Raises:
        ValueError: the page does not have each comment once.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"the page has no place for tested versions: copy the two comments of {PAGE} into it")
    before, _, rest = page.partition(BEGIN)
    inside, _, after = rest.partition(END)
    return before + BEGIN, inside, END + after


def _order(each: Row) -> tuple[object, ...]:
    """Return the sort key of a row, in which numbers in versions compare as numbers."""
    return tuple([int(part) if part.isdigit() else -1 for part in re.split(r"(\d+)", text)] for text in each.of[:3])


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a visit's row into the table. Return 2 if the report makes no row."""
    line = argparse.ArgumentParser(
        prog="python -m scripts.tested", description=f"Write the row of a GPU report into the table of {PAGE}."
    )
    line.add_argument("report", type=Path, help="the lines.jsonl of a report, or a folder or archive that contains it")
    line.add_argument("--into", type=Path, default=REPO, help="the repository with the table (default: this one)")
    options = line.parse_args(arguments)
    try:
        new = row_of_report(lines_of(options.report))
    except Refused as refusal:
        print(refusal, file=sys.stderr)
        return 2
    record(new, options.into)
    print(markdown.table(HEAD, [astuple(new)]), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
