"""Docstrings: each opens with a verb or a noun, and no sentence is too long to be understood at once."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator

import pytest

from tests.pack.test_names import sources

FOLDERS = ("nodes", "parallel_backend", "scripts", "benchmarks", "tests/support")

OPENINGS = frozenset({"what", "whether", "how", "which", "where", "that", "of"})
"""Words that no docstring opens with, and that do not follow its verb ("Return what ...")."""

MAX_WORDS = 30
"""The most words of a sentence."""


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring, those of attributes and constants included."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", ())
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a docstring, without indented blocks. List items and entries such as `name: text` end a sentence."""
    blocks = (block for block in re.split(r"\n\s*\n", inspect.cleandoc(text)) if not block.startswith("    "))
    for part in (part for block in blocks for part in re.split(r"\n\s*(?=- |\| |[\w*, ]+:\s)", block)):
        yield from re.split(r"(?<=[.!?:;])\s+", " ".join(part.split()))


def is_fault(text: str) -> bool:
    """Return True if a docstring opens badly or has a sentence that is too long."""
    first, second = [*re.findall(r"[\w'-]+", text.lower())[:2], "", ""][:2]
    bad = first in OPENINGS or second in OPENINGS - {"of", "that"}
    return bad or any(len(sentence.split()) > MAX_WORDS for sentence in sentences(text))


def test_docstrings_open_with_a_verb_or_a_noun_and_have_short_sentences() -> None:
    files = sources(FOLDERS)
    found = {f"{path}:{line}": text for path, source in files.items() for line, text in docstrings(source)}
    assert len(files) > 500 and len(found) > 5000
    assert {place: text.split()[:6] for place, text in found.items() if is_fault(text)} == {}


@pytest.mark.parametrize(
    ("docstring", "bad"),
    [
        ("What a rank holds.", True),
        ("Return whether the rank holds it.", True),
        ("Of a call, the rows.", True),
        ("Return the rows " + "of a call " * 10 + ".", True),
        ("Return the rows of a call.", False),
        (f"Return the rows.\n\n    Args:\n        rows: {'a row, ' * 12}or one.\n        more: {'a row ' * 12}", False),
    ],
)
def test_a_bad_docstring_is_found(docstring: str, bad: bool) -> None:
    for source in (f'def run() -> None:\n    """{docstring}"""\n', f'ROWS = 1\n"""{docstring}"""\n'):
        assert [is_fault(text) for _, text in docstrings(source)] == [bad]
