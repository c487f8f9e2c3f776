"""The objects that a module's source binds to each name, found without running the source."""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ....source_code import parse


@dataclass(frozen=True)
class Defined:
    """A function or class that a module's file defines under a qualified name; `decorated` if it has decorators."""

    module: str
    file: str
    name: str
    is_class: bool
    decorated: bool


@dataclass(frozen=True)
class Imported:
    """A module that a name is bound to by an import."""

    name: str


@dataclass(frozen=True)
class Literal:
    """A constant that a module's source writes out."""

    module: str
    value: Any


@dataclass(frozen=True)
class Computed:
    """The value of an expression in `module`, or a name that a library binds in another way."""

    module: str


Binding = Defined | Imported | Literal | Computed

Find = Callable[[str], "str | None"]
"""A function from a module's name to its file. It returns "" if no source can be read, and None if no such module exists."""


def imported_file(module: str) -> str | None:
    """Return the file of a module imported in this process, "" if it has none, None if it is not imported."""
    module_object = sys.modules.get(module)
    return None if module_object is None else getattr(module_object, "__file__", None) or ""


@dataclass(frozen=True)
class _From:
    """A binding by `from module import name`."""

    module: str
    name: str


@dataclass(frozen=True)
class _Same:
    """Another name of the module, and attributes of it."""

    chain: tuple[str, ...]


@dataclass(frozen=True)
class ModuleBindings:
    """The bindings of a file.

    Attributes:
        module: the bindings of the module's names.
        classes: the functions in the body of each class, by name.
        stars: the modules from which the file imports all names.
    """

    module: dict[str, list[Binding | _From | _Same]]
    classes: dict[str, dict[str, list[Defined]]]
    stars: tuple[str, ...]


@functools.cache
def bound(module: str, name: str, find: Find = imported_file) -> tuple[Binding, ...]:
    """Return every object that a module's source may bind a name to; empty if the source does not bind the name.

    Args:
        find: finds the files of modules; by default those of modules imported in this process.
    """
    return _bound(module, name, frozenset(), find)


def _bound(module: str, name: str, seen: frozenset[tuple[str, str]], find: Find) -> tuple[Binding, ...]:
    """Follow a name through imports. `seen` holds the names already followed, so that circular imports end."""
    if (module, name) in seen:
        return ()
    if module.partition(".")[0] in sys.stdlib_module_names:
        return (Computed(module),)
    seen |= {(module, name)}
    source = source_of(module, find)
    if source is None:
        return ()
    bindings: list[Binding] = []
    for binding in source.module.get(name, ()):
        if isinstance(binding, _From):
            bindings += _imported(binding.module, binding.name, seen, find)
        elif isinstance(binding, _Same):
            bindings += _followed(module, binding.chain, seen, find)
        else:
            bindings.append(binding)
    if not bindings and name not in source.module and not name.startswith("_"):
        bindings = [binding for star in source.stars for binding in _bound(star, name, seen, find)]
    return (
        tuple(dict.fromkeys(bindings))
        if all(not isinstance(binding, Literal) for binding in bindings)
        else tuple(bindings)
    )


def methods(module: str, name: str, find: Find = imported_file) -> dict[str, list[Defined]]:
    """Return the functions defined in a class body, by name. `name` is the class's qualified name within the module."""
    source = source_of(module, find)
    return {} if source is None else source.classes.get(name, {})


def source_of(module: str, find: Find = imported_file) -> ModuleBindings | None:
    """Return the bindings of a module; None if its source cannot be read."""
    file = find(module)
    if not file or not file.endswith(".py"):
        return None
    return _read(file, module, file.endswith("__init__.py"))


def _imported(module: str, name: str, seen: frozenset[tuple[str, str]], find: Find) -> Sequence[Binding]:
    if find(module) is None:
        return ()
    whole = f"{module}.{name}"
    bindings = _bound(module, name, seen, find)
    if not bindings and find(whole) is not None:
        return (Imported(whole),)
    return bindings or (Computed(module),)


def _followed(module: str, chain: tuple[str, ...], seen: frozenset[tuple[str, str]], find: Find) -> Sequence[Binding]:
    first, *rest = chain
    bindings: Sequence[Binding] = _bound(module, first, seen, find)
    for name in rest:
        bindings = [
            binding
            for each in bindings
            for binding in (
                _imported(each.name, name, seen, find) if isinstance(each, Imported) else (Computed(module),)
            )
        ]
    return bindings or (Computed(module),)


@functools.cache
def _read(file: str, module: str, package: bool) -> ModuleBindings | None:
    tree = parse(file)
    if tree is None:
        return None
    reader = _StatementReader(file, module, package)
    reader.read(tree.body, "", reader.names)
    return ModuleBindings(reader.names, reader.classes, tuple(reader.stars))


class _StatementReader:
    """A reader of a file's statements, which collects the bindings in them."""

    def __init__(self, file: str, module: str, package: bool) -> None:
        self._file, self._module, self._package = file, module, package
        self.names: dict[str, list[Binding | _From | _Same]] = {}
        self.classes: dict[str, dict[str, list[Defined]]] = {}
        self.stars: list[str] = []

    def read(self, body: Sequence[ast.stmt], prefix: str, into: dict[str, Any] | None) -> None:
        """Add the names that statements bind to `into` (a module's or class's names), and collect all classes in them."""
        for node in _flat(body):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self._definition(node, prefix, into)
            elif isinstance(node, ast.Global):  # a function binds names of the module
                for name in node.names:
                    self.names.setdefault(name, []).append(Computed(self._module))
            elif into is self.names:
                for name, binding in self._bindings(node):
                    self.names.setdefault(name, []).append(binding)
            elif into is not None and isinstance(
                node, ast.Assign | ast.AnnAssign
            ):  # in a class: another name of a function
                for name in _targets(node):
                    into.setdefault(name, []).extend(into.get(getattr(node.value, "id", ""), ()))

    def _definition(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, prefix: str, into: dict[str, Any] | None
    ) -> None:
        name, is_class = f"{prefix}{node.name}", isinstance(node, ast.ClassDef)
        if into is not None:
            defined = Defined(self._module, self._file, name, is_class, bool(node.decorator_list))
            into.setdefault(node.name, []).append(defined)
        if is_class:
            self.read(node.body, f"{name}.", self.classes.setdefault(name, {}))
        else:
            self.read(node.body, f"{name}.<locals>.", None)

    def _bindings(self, node: ast.stmt) -> Iterator[tuple[str, Binding | _From | _Same]]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                yield (alias.asname, Imported(alias.name)) if alias.asname else (top, Imported(top))
        elif isinstance(node, ast.ImportFrom):
            base = self._base(node)
            for alias in node.names:
                if alias.name == "*":
                    self.stars.append(base)
                else:
                    yield alias.asname or alias.name, _From(base, alias.name)
        else:
            value = self._value(node)
            for name in _targets(node):
                yield name, value or Computed(self._module)

    def _value(self, node: ast.stmt) -> Binding | _Same | None:
        """Return the value of a plain assignment, if it is a name or a literal."""
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if value is None or not all(isinstance(each, ast.Name) for each in targets):
            return None
        if chain := _chain(value):
            return _Same(chain)
        try:
            literal = ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return None
        return (
            Literal(self._module, literal) if literal not in ({}, [], set()) else None
        )  # other code fills an empty table

    def _base(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self._module if self._package else self._module.rpartition(".")[0]
        return importlib.util.resolve_name("." * node.level + (node.module or ""), package)


def _chain(node: ast.expr) -> tuple[str, ...]:
    """Return the names of `a.b.c`; empty for any other expression."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute) and (first := _chain(node.value)):
        return (*first, node.attr)
    return ()


def _flat(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a body, including those under conditions."""
    for node in body:
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for part in ("body", "orelse", "finalbody"):
            yield from _flat(getattr(node, part, ()))
        for handler in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            yield from _flat(handler.body)


def _targets(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement itself binds, except by an import or a definition."""
    fields = [getattr(node, name, None) for name in ("targets", "target")]
    fields += [item.optional_vars for item in getattr(node, "items", ())]
    for field in fields:
        for target in field if isinstance(field, list) else [field]:
            if isinstance(target, ast.AST):
                yield from (name.id for name in ast.walk(target) if isinstance(name, ast.Name) and _is_bound(name))


def _is_bound(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)
