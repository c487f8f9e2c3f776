"""Python code, read without running it: the syntax of files, digests of syntax, and the names that compiled code uses."""

from __future__ import annotations

import ast
import dis
import functools
import hashlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

NO_EFFECT = frozenset({"annotation", "ctx", "kind", "returns", "simple", "type_comment", "type_params"})
"""Fields of syntax nodes that change no result, or that only some versions of Python have."""

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def parse(file: str | None, mentioned: str = "") -> ast.Module | None:
    """Return the syntax tree of a file; None if there is no such file, it is not Python source or does not mention a name."""
    try:
        source = Path(file).read_bytes() if file else b""
        return ast.parse(source) if file and mentioned.encode() in source else None
    except (OSError, SyntaxError, ValueError):
        return None


def definitions(tree: ast.AST) -> Mapping[str, Sequence[Definition]]:
    """Return the functions and classes of a syntax tree by qualified name. The branches of an `if` may define a name twice."""
    found: dict[str, list[Definition]] = {}

    def look(body: Iterable[ast.AST], prefix: str) -> None:
        for node in body:
            if isinstance(node, Definition):
                found.setdefault(f"{prefix}{node.name}", []).append(node)
                look(node.body, f"{prefix}{node.name}{'.' if isinstance(node, ast.ClassDef) else '.<locals>.'}")
            elif isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
                look(ast.iter_child_nodes(node), prefix)

    look(ast.iter_child_nodes(tree), "")
    return found


def syntax_digest(code: CodeType) -> str:
    """Return the digest of a function's syntax in its file; empty if the file has no such function."""
    nodes = _functions_in(code.co_filename).get((code.co_firstlineno, code.co_name), ())
    return digest_of(*nodes) if nodes else ""


@functools.cache
def _functions_in(file: str) -> Mapping[tuple[int, str], Sequence[ast.AST]]:
    """Return the functions of a file, by first line (as `co_firstlineno` counts, decorators included) and name."""
    found: dict[tuple[int, str], list[ast.AST]] = {}
    for node in ast.walk(parse(file) or ast.Module([], [])):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
            line = min([node.lineno, *(each.lineno for each in decorators)])
            found.setdefault((line, getattr(node, "name", "<lambda>")), []).append(node)
    return found


def digest_of(*nodes: ast.AST) -> str:
    """Return sixteen hexadecimal digits of syntax, without comments, docstrings, annotations and layout.

    The digest is the same in every version of Python that parses the nodes.
    """
    digest = hashlib.blake2b(digest_size=8)
    for node in nodes:
        for token in _tokens(node):
            digest.update(f"{token}\n".encode())
    return digest.hexdigest()


def _tokens(node: ast.AST) -> Iterator[str]:
    yield type(node).__name__
    for name, value in ast.iter_fields(node):
        if name in NO_EFFECT or value is None or value == []:
            continue
        yield name
        for child in _effective(value) if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _tokens(child)
            else:
                yield f"{type(child).__name__} {child!r}"
    yield ")"


def _effective(nodes: list[ast.AST]) -> Iterator[ast.AST]:
    """Yield the nodes that compute: no docstrings, no other bare constants, and an annotated name only where it gets a value."""
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.AnnAssign):
            if node.value is not None:
                yield ast.Assign(targets=[node.target], value=node.value)
            continue
        yield node


def layers_of(value: Any) -> Iterator[FunctionType]:
    """Yield the functions that a callable object consists of, from the outermost wrapper to the innermost function."""
    if isinstance(value, property):
        for accessor in (value.fget, value.fset):
            yield from layers_of(accessor)
        return
    while value is not None:
        if isinstance(value, staticmethod | classmethod) or inspect.ismethod(value):
            value = value.__func__
        elif isinstance(value, functools.partial):
            value = value.func
        elif isinstance(value, FunctionType):
            yield value
            value = getattr(value, "__wrapped__", None)
        else:
            return


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code, and the code of all functions and classes that are defined inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def names_in(code: CodeType) -> frozenset[str]:
    """Return all names of globals and attributes in a function's code and the code inside of it."""
    return frozenset(name for each in codes_in(code) for name in each.co_names)


@dataclass(frozen=True)
class CodeUses:
    """The names that a function's code, and the code inside of it, reads.

    Attributes:
        chains: names of globals, each with the attributes that are read off it: `a.b.c`.
        imports: names of modules in import statements.
        attributes: names of attributes, and names imported from modules.
        names: all names in the code, including names that it only writes.
    """

    chains: frozenset[tuple[str, ...]]
    imports: frozenset[str]
    attributes: frozenset[str]
    names: frozenset[str]

    @property
    def globals(self) -> frozenset[str]:
        """Return the names of globals."""
        return frozenset(chain[0] for chain in self.chains)


@functools.cache
def uses_of(code: CodeType) -> CodeUses:
    """Return the names that a function's code, and the code inside of it, reads."""
    chains: set[tuple[str, ...]] = set()
    imports: set[str] = set()
    attributes: set[str] = set()
    for part in codes_in(code):
        chain: tuple[str, ...] = ()
        for step in dis.get_instructions(part):
            if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                attributes.add(step.argval)
                chain = (*chain, step.argval) if chain else ()
                continue
            if step.opname in ("CACHE", "EXTENDED_ARG", "NOP"):
                continue
            if chain:
                chains.add(chain)
            chain = (step.argval,) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") else ()
            if step.opname == "IMPORT_NAME":
                imports.add(step.argval)
            elif step.opname == "IMPORT_FROM":
                attributes.add(step.argval)
        if chain:
            chains.add(chain)
    return CodeUses(frozenset(chains), frozenset(imports), frozenset(attributes), names_in(code))
