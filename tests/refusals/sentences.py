"""Every sentence in the code that tells a user of an error, and the sentences that no test quotes."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

from scripts.comfyui import REPO

ERRORS = ("Refused", "PlanRefused", "AnotherResult", "NotFinite", "RequestFailed", "WorkerFailed", "WorkerOutOfMemory")
"""Exceptions that reach the user."""

HELPERS = ("refuse_weights", "refusal", "_refused")
"""Functions that make a refusal from the text that they receive."""

GAP = "…"
"""Stands for a value in a sentence."""

QUOTE = 3
"""A test that has this many words of a sentence in a row quotes the sentence."""

SHARED = 3
"""Words in a row that more sentences than this share are no quote, such as "which is not supported"."""

VALUES = re.compile(r"\.\*|\\d\+|\{\w*\}")
"""Wildcards of a regular expression and fields of a format string."""

NO_TEST: Mapping[str, tuple[str, ...]] = {
    "only another version of ComfyUI, torch or diffusers causes it": (
        "a node's function (…)",
        "A model patch cannot be used with this model",
        "the model's … has no …: this ComfyUI is",
        "the model's … has no …: this ComfyUI or diffusers is",
        "the model's … attends with … queries to … keys and this pack expects … and",
        "the model's … attends with … queries to … keys and this pack expects …:",
        "the model's … attends with … queries and this pack",
        "the model's … calls attention and this pack",
        "the model's … calls … and this pack",
        "the model makes … tokens where the picture",
    ),
    "workers on other machines, or their start, fail so": (
        "The connection to … was lost",
        "Worker … did not start within",
    ),
    "ComfyUI 0.30 has no model and node that cause it together": (
        "…differs from GPU to GPU",
        "…has … entries for … tokens",
        "the model's … has a bias, which",
        "…has several streams of tokens",
        "…has a different mask for each query",
        "…merges attention of several workers",
        "…adds a bias to its attention",
    ),
    "ComfyUI leaves out such a patch": ("a patch of the type …",),
    "a check before it refuses such a tensor": ("the tensor … is of …, and only",),
}
"""Beginnings of the sentences that no test quotes, by the reason."""


def sentences() -> set[str]:
    """Return the text of every error that the code raises for users, with a gap for each value.

    A text without a word of its own is left out: another text takes the place of its gap.
    """
    return {text for path in _files() for text in _texts_of_errors(path) if re.search(r"\w", text)}


def strings() -> set[str]:
    """Return every string in the source of the product, docstrings excepted, with a gap for each value."""
    return {text for path in _files() for text in _strings(path)}


def unquoted(texts: Set[str]) -> set[str]:
    """Return those of `texts` that no string in the source of a test quotes."""
    tests = [path for path in (REPO / "tests").rglob("*.py") if path != Path(__file__)]
    quotes = [string for path in tests for string in _strings(path)]
    in_tests = {length: {run for string in quotes for run in _runs(string, length)} for length in range(1, QUOTE + 1)}
    sharing = Counter(run for text in texts for run in _runs(text, QUOTE))

    def is_quoted(text: str) -> bool:
        length = min(QUOTE, max(map(len, _parts(text))))
        runs = _runs(text, length)
        telling = {run for run in runs if sharing[run] <= SHARED}
        return not in_tests[length].isdisjoint(telling or runs)

    return {text for text in texts if not is_quoted(text)}


def _files() -> Iterator[Path]:
    return (path for folder in ("nodes", "parallel_backend") for path in (REPO / folder).rglob("*.py"))


def _texts_of_errors(path: Path) -> Iterator[str]:
    source = path.read_text(encoding="utf-8")
    if not any(name in source for name in ERRORS + HELPERS):
        return
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and _name(call.func) in ERRORS + HELPERS:
            yield re.sub(f"{GAP}+", GAP, GAP.join(filter(None, map(_text, call.args))))


def _strings(path: Path) -> Iterator[str]:
    """Yield the strings of a file, docstrings excepted."""
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            yield _text(node)
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            waiting += ast.iter_child_nodes(node)


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _text(value: ast.expr) -> str:
    """Return the words of an expression, with a gap for each value."""
    if isinstance(value, ast.Constant):
        return value.value if isinstance(value.value, str) else GAP
    if isinstance(value, ast.JoinedStr):
        return "".join(_text(part) for part in value.values)
    return GAP


def _parts(text: str) -> list[list[str]]:
    """Return the words between the gaps of a sentence or of a regular expression for one."""
    parts = VALUES.sub(GAP, text).replace("\\", "").split(GAP)
    return [re.findall(r"[\w'%/=-]+", part) for part in parts]


def _runs(text: str, length: int) -> set[tuple[str, ...]]:
    """Return every `length` words in a row of a text, without a value between them."""
    return {tuple(part[at : at + length]) for part in _parts(text) for at in range(len(part) - length + 1)}
