"""Finds the uses of ComfyUI in a source file: names, calls, and methods of ComfyUI's classes that the file overrides."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

ROOTS = frozenset(
    {
        "comfy", "comfy_api", "comfy_execution", "comfy_extras", "comfyui_version", "execution", "folder_paths",
        "latent_preview", "node_helpers", "nodes", "server",
    }
)  # fmt: skip
"""ComfyUI's modules and packages, as the pack imports them; the pack imports its own `nodes` relatively."""

GUARDS = frozenset({"ImportError", "ModuleNotFoundError", "AttributeError", "Exception"})
PATH = re.compile(r"(comfy|comfy_extras)(\.[A-Za-z_]\w*)+")
MODEL = re.compile(r"[a-z_]\w*(\.[a-z_]\w*)*\.[A-Z]\w*")
"""Pattern of a class of `comfy.ldm`, as the small models name their classes."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Use:
    """A use of a name of ComfyUI's.

    Attributes:
        name: the dotted name, with its module.
        where: file and line in the pack.
        kind: `name`, `call`, `super` (a call of an overridden method), `override` or `replaced`.
        arguments: the arguments of a call, or the parameters of a method that overrides ComfyUI's.
        optional: True if the pack works without the name.
    """

    name: str
    where: str
    kind: str = "name"
    arguments: ast.Call | ast.arguments | None = None
    optional: bool = False


def uses_in(source: str | bytes, where: str) -> list[Use]:
    """Return the uses of ComfyUI in a source file.

    A use is optional if the file tests for the name (`hasattr`, `except ImportError`), imports it under TYPE_CHECKING, or holds
    the name in a string.

    Args:
        where: the path of the file, for reports.
    """
    reader = _Uses(where)
    reader.visit(ast.parse(source))
    asked = tuple(reader.asked)
    return [replace(use, optional=use.optional or f"{use.name}.".startswith(asked)) for use in reader.found]


class _Uses(ast.NodeVisitor):
    def __init__(self, where: str) -> None:
        self.found: list[Use] = []
        self.asked: set[str] = set()
        self._where = where
        self._scopes: tuple[dict[str, str], ...] = ({},)
        self._bases: tuple[str, ...] = ()
        self._optional = False

    def _add(
        self, name: str, node: ast.expr | ast.stmt, kind: str = "name",
        arguments: ast.Call | ast.arguments | None = None, optional: bool = False,
    ) -> None:  # fmt: skip
        where = f"{self._where}:{node.lineno}"
        self.found.append(Use(name, where, kind, arguments, self._optional or optional))

    def _name(self, node: ast.AST) -> str:
        """Return the dotted ComfyUI name that an expression refers to; empty for any other expression."""
        match node:
            case ast.Name(name):
                return next((scope[name] for scope in reversed(self._scopes) if name in scope), "")
            case ast.Attribute(ast.Call(ast.Name("super"), []), attribute) if self._bases:
                return f"{self._bases[0]}.{attribute}"
            case ast.Attribute(value, attribute) | ast.Call(ast.Name("getattr"), [value, ast.Constant(str(attribute))]):
                return f"{name}.{attribute}" if (name := self._name(value)) else ""
            case ast.Call(ast.Name("import_module") | ast.Attribute(_, "import_module"), [ast.Constant(str(module))]):
                return module if module.partition(".")[0] in ROOTS else ""
        return ""

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            first = alias.name.partition(".")[0]
            name = (alias.name if alias.asname else first) if first in ROOTS else ""
            self._scopes[-1][alias.asname or first] = name
            if name:
                self._add(alias.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        ours = not node.level and (node.module or "").partition(".")[0] in ROOTS
        for alias in node.names:
            self._scopes[-1][alias.asname or alias.name] = f"{node.module}.{alias.name}" if ours else ""
            if ours:
                self._add(f"{node.module}.{alias.name}", node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        for each in (*getattr(node, "decorator_list", ()), *node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(each)
        before = self._scopes
        self._scopes = (*before, {each.arg: "" for each in ast.walk(node.args) if isinstance(each, ast.arg)})
        for statement in node.body if isinstance(node.body, list) else [node.body]:
            self.visit(statement)
        self._scopes = before

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for each in (*node.bases, *node.keywords, *node.decorator_list):
            self.visit(each)
        before, bases = self._scopes, self._bases
        self._bases = tuple(name for base in node.bases if (name := self._name(base)))
        for statement in node.body:
            method = isinstance(statement, Function)
            self._scopes = before if method else (*before, {})  # a method does not see the names of its class
            if isinstance(statement, Function) and not statement.name.startswith("__"):
                for base in self._bases:
                    self._add(f"{base}.{statement.name}", statement, "override", statement.args)
            self.visit(statement)
        self._scopes, self._bases = before, bases

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self._scopes[-1][target.id] = self._name(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        for each in filter(None, (node.value, node.target)):  # nothing evaluates the annotation
            self.visit(each)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self._scopes[-1][node.id] = ""

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if name := self._name(node):
            self._add(name, node)
        self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        match node:
            case ast.Call(ast.Name("hasattr" | "getattr"), [value, ast.Constant(str(attribute)), *more]) if (
                name := self._name(value)
            ):
                if more or node.func.id == "hasattr":  # type: ignore[attr-defined]
                    self.asked.add(f"{name}.{attribute}.")
                self._add(f"{name}.{attribute}", node)
            case ast.Call(_, [ast.Constant(str(path)), *_]) if "/small/" in self._where and MODEL.fullmatch(path):
                self._add(f"comfy.ldm.{path}", node, optional=True)
            case ast.Call(ast.Attribute(ast.Call(ast.Name("super"), [])) as function) if name := self._name(function):
                self._add(name, node, "super", node)
            case ast.Call(function) if name := self._name(function):
                self._add(name, node, "call", node)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and PATH.fullmatch(node.value):
            self._add(node.value, node, optional=True)

    def visit_Try(self, node: ast.Try) -> None:
        kinds = [ast.unparse(each.type) if each.type else "Exception" for each in node.handlers]
        self._under(any(GUARDS & {*re.findall(r"\w+", kind)} for kind in kinds), node.body)
        self._under(False, (*node.handlers, *node.orelse, *node.finalbody))

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self._under(ast.unparse(node.test) == "TYPE_CHECKING", node.body)
        self._under(False, node.orelse)

    def _under(self, optional: bool, body: Iterable[ast.AST]) -> None:
        before, self._optional = self._optional, self._optional or optional
        for each in body:
            self.visit(each)
        self._optional = before
