"""Every place in the code that makes an error with a sentence for the user, found by reading the code, and who reaches it."""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.comfyui import REPO

REACHED = Path(__file__).with_name("reached.json")

BEGINNING = 80
"""Characters of a sentence that name its place."""

ERRORS = ("Refused", "PlanRefused", "AnotherResult", "NotFinite", "RequestFailed", "WorkerFailed", "WorkerOutOfMemory")
"""Those that reach the user."""

HELPERS = ("refuse_weights", "refusal", "_refused")
"""Functions that make a refusal of what they are given."""

GAP = "…"
"""For a value in a sentence."""

FRAME = re.compile(r'File "[^"]*?/((?:nodes|parallel_backend)/[^"]+)", line (\d+)')
FROM_WORKERS = "parallel_backend/host/workers/group.py"
"""Where a refusal that a worker sent is raised again."""


@dataclass(frozen=True)
class Place:
    """One sentence in one file; `lines` are the statements that raise it, none where it is made for another to raise."""

    file: str
    text: str
    lines: tuple[range, ...]

    @property
    def name(self) -> str:
        """The file and the beginning of the sentence, so that the end may be worded otherwise."""
        return f"{self.file}: {self.text[:BEGINNING]}"

    def said(self, message: str, traceback: str) -> bool:
        """Whether an error came from here."""
        if not re.search(".*".join(map(re.escape, self.text.split(GAP))), message, re.DOTALL):
            return False
        frames = FRAME.findall(traceback)
        if not self.lines or (frames and frames[-1][0] == FROM_WORKERS):
            return True
        return any(file == self.file and int(line) in lines for file, line in frames for lines in self.lines)


@functools.cache
def places() -> tuple[Place, ...]:
    """All of them, in the order of files and lines."""
    found: dict[tuple[str, str], tuple[range, ...]] = {}
    for folder in ("nodes", "parallel_backend"):
        for path in sorted((REPO / folder).rglob("*.py")):
            for text, lines in _of_file(path):
                key = path.relative_to(REPO).as_posix(), text
                found[key] = found.get(key, ()) + lines
    return tuple(Place(file, text, lines) for (file, text), lines in found.items())


def _of_file(path: Path) -> Iterator[tuple[str, tuple[range, ...]]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    raised = {each.exc: each for each in ast.walk(tree) if isinstance(each, ast.Raise)}
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or _name(call.func) not in ERRORS + HELPERS:
            continue
        text = GAP.join(filter(None, map(_text, call.args)))
        text = re.sub(f"{GAP}+", GAP, text)
        statement = raised.get(call)
        lines = (range(statement.lineno, (statement.end_lineno or 0) + 1),) if statement else ()
        yield text, lines


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _text(value: ast.expr) -> str:
    """The words of an expression, with a gap for each value."""
    if isinstance(value, ast.Constant):
        return value.value if isinstance(value.value, str) else GAP
    if isinstance(value, ast.JoinedStr):
        return "".join(_text(each) for each in value.values)
    return GAP


def called(file: str, text: str) -> list[Place]:
    """The place of a file with this text, else those whose texts begin with it."""
    mine = [place for place in places() if place.file == file]
    return [each for each in mine if each.text == text] or [each for each in mine if each.text.startswith(text)]


def reached(errors: Sequence[tuple[str, str]]) -> list[str]:
    """The names of the places that errors come from, each a message and a traceback."""
    return sorted(place.name for place in places() if any(place.said(*error) for error in errors))


class Reached:
    """Which places each list of refused graphs reaches, as it was when `--record-refusals` last wrote it down."""

    def __init__(self, path: Path = REACHED) -> None:
        self._path = path
        self._lists: dict[str, list[str]] = json.loads(path.read_text(encoding="utf-8"))

    def of(self, name: str) -> list[str]:
        """The places that a list reaches."""
        return self._lists.get(name, [])

    def all(self) -> set[str]:
        """The places that any list reaches."""
        return {place for found in self._lists.values() for place in found}

    def record(self, name: str, found: list[str]) -> None:
        """Write down what a list reaches."""
        self._lists[name] = found
        text = json.dumps(self._lists, indent=1, ensure_ascii=False, sort_keys=True)
        self._path.write_text(f"{text}\n", encoding="utf-8")
