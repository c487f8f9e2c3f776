"""The syntax of a function in place: digested without comments, docstrings, annotations and layout."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

LEFT_OUT = frozenset({"annotation", "ctx", "kind", "returns", "simple", "type_comment", "type_params"})
"""Fields of syntax that change nothing of what is computed, or that only some versions of Python have."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class Sources:
    """The syntax of files, each read and parsed once; one that cannot be has none."""

    def __init__(self) -> None:
        self._files: dict[str, dict[tuple[int, str], list[Definition]]] = {}

    def digest(self, code: CodeType) -> str:
        """Of a function's code, as its file has it; empty where the file has no such function."""
        definitions = self._definitions(code.co_filename).get((code.co_firstlineno, code.co_name), ())
        return digest_of(*definitions) if definitions else ""

    def _definitions(self, file: str) -> dict[tuple[int, str], list[Definition]]:
        """By the line where Python says that a function begins, and its name."""
        if file not in self._files:
            definitions: dict[tuple[int, str], list[Definition]] = {}
            for node in ast.walk(_parsed(file)):
                if isinstance(node, Definition):
                    decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
                    line = min([node.lineno, *(each.lineno for each in decorators)])
                    definitions.setdefault((line, getattr(node, "name", "<lambda>")), []).append(node)
            self._files[file] = definitions
        return self._files[file]


def digest_of(*nodes: ast.AST) -> str:
    """Sixteen hexadecimal digits, the same in every version of Python that parses them."""
    digest = hashlib.blake2b(digest_size=8)
    for node in nodes:
        for token in _tokens(node):
            digest.update(f"{token}\n".encode())
    return digest.hexdigest()


def _parsed(file: str) -> ast.AST:
    try:
        return ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _tokens(node: ast.AST) -> Iterator[str]:
    yield type(node).__name__
    for name, value in ast.iter_fields(node):
        if name in LEFT_OUT or value is None or value == []:
            continue
        yield name
        for child in _statements(value) if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _tokens(child)
            else:
                yield f"{type(child).__name__} {child!r}"
    yield ")"


def _statements(nodes: list[ast.AST]) -> Iterator[ast.AST]:
    """What is computed: no docstrings, no other bare constants, and an annotated name only where it gets a value."""
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.AnnAssign):
            if node.value is not None:
                yield ast.Assign(targets=[node.target], value=node.value)
            continue
        yield node
