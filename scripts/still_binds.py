"""Checks a ComfyUI's sources for everything that this pack uses. Nothing of ComfyUI is imported or run.

    python -m scripts.still_binds FOLDER

prints one page of Markdown, and exits with 1 if a use does not bind. A name that the pack imports, reads or replaces must
exist. A function must accept the arguments of the pack's call. A method of the pack must accept all parameters of the method
that it overrides. The check ignores attributes of objects, and calls of functions that a decorator changes.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallel_backend.markdown import table
from parallel_backend.models.comfyui.content.bindings import Binding, Computed, Defined, bound, methods
from parallel_backend.models.comfyui.content.known import tables
from parallel_backend.models.comfyui.content.replaced_functions import REPLACED_FUNCTIONS
from parallel_backend.models.comfyui.content.source_digests import ABSENT
from parallel_backend.source_code import Definition, definitions, digest_of, parse

from .comfyui_uses import ROOTS, Function, Use, uses_in
from .tested import comfyui_name

REPO = Path(__file__).parents[1]
KINDS = {
    "name": "names", "call": "calls", "super": "calls of overridden methods", "override": "overridden methods",
    "replaced": "functions that the pack replaces",
}  # fmt: skip
HEAD = "kind", "different names", "uses", "do not bind", "optional, and do not bind"

HARMLESS = frozenset({"staticmethod", "classmethod", "torch.no_grad()", "torch.inference_mode()", "functools.cache"})
"""Decorators that do not change a function's parameters."""

UNTOLD: tuple[Binding, ...] = (Computed(""),)
"""The result for a name that only a running ComfyUI can resolve."""


@dataclass(frozen=True)
class Tree:
    """The sources of one ComfyUI, not imported. A call with a module's name returns the module's file."""

    folder: Path

    def __call__(self, module: str) -> str | None:
        """Return a module's file, as `bindings.Find` specifies. A library's module exists and has no readable source."""
        if module.partition(".")[0] not in ROOTS:
            return ""
        path = self.folder.joinpath(*module.split("."))
        files = (path.with_name(f"{path.name}.py"), path / "__init__.py")
        return next((str(file) for file in files if file.is_file()), "" if path.is_dir() else None)

    def split(self, name: str) -> tuple[str, list[str]]:
        """Return the module of a dotted name (empty if there is none), and the names within the module."""
        parts = name.split(".")
        size = next((size for size in range(len(parts), 0, -1) if self(".".join(parts[:size])) is not None), 0)
        return ".".join(parts[:size]), parts[size:]

    def fault(self, use: Use) -> str:
        """Return the reason why a use does not bind; empty if it binds, or if the sources cannot decide."""
        found, missing = self.resolved(use.name)
        if use.kind != "override" and missing:
            return f"has no {missing}"
        node = self._function(found)
        if node is None or use.arguments is None:
            return ""
        if isinstance(use.arguments, ast.arguments):
            return rejected_parameters(use.arguments, node.args)
        given = use.kind == "super" or (found is not None and found.is_class)
        return rejected_arguments(
            node.args, int(given or "classmethod" in map(ast.unparse, node.decorator_list)), use.arguments
        )

    def resolved(self, name: str) -> tuple[Defined | None, str]:
        """Return the one definition of a dotted name, or None, and the part of the name that is missing."""
        module, names = self.split(name)
        if not module:
            return None, name.partition(".")[0]
        if not names or names[0].startswith("__"):
            return None, ""
        found, missing = bound(module, names[0], self), names[0]
        for attribute in names[1:]:
            if not (len(found) == 1 and isinstance(kind := found[0], Defined) and kind.is_class):
                break
            found, missing = self._attribute(kind, attribute), attribute
        if not found:
            return None, missing
        return (found[0], "") if len(found) == 1 and isinstance(found[0], Defined) else (None, "")

    def _attribute(self, kind: Defined, name: str) -> tuple[Binding, ...]:
        """Return the definitions of a class's attribute, inherited ones included; empty if there are none."""
        own = methods(kind.module, kind.name, self)
        if name in own:
            return tuple(own[name]) or UNTOLD
        node = definitions_in(kind.file)[kind.name][0]
        if not isinstance(node, ast.ClassDef) or name in set_outside(kind.file, kind.name):
            return UNTOLD
        for base in node.bases:
            above = self.resolved(f"{kind.module}.{ast.unparse(base)}")[0]
            if found := self._attribute(above, name) if above is not None and above.is_class else UNTOLD:
                return found
        return UNTOLD if name.startswith("__") else ()

    def _function(self, found: Defined | None) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        """Return the function that a call runs: the definition, or a class's `__init__`. None if a decorator may replace it."""
        if found is not None and found.is_class and not found.decorated:
            made = self._attribute(found, "__init__")
            found = made[0] if len(made) == 1 and isinstance(made[0], Defined) else None
        nodes = definitions_in(found.file)[found.name] if found is not None else ()
        node = nodes[0] if len(nodes) == 1 else None
        return node if isinstance(node, Function) and {*map(ast.unparse, node.decorator_list)} <= HARMLESS else None


def rejected_arguments(parameters: ast.arguments, first: int, call: ast.Call) -> str:
    """Return the reason why a function does not accept a call's arguments; empty if it accepts them.

    Args:
        first: the number of leading parameters that Python fills: 1 for `self` or `cls`.
    """
    positional = [each.arg for each in (*parameters.posonlyargs, *parameters.args)][first:]
    keywords = {each.arg for each in call.keywords}
    given = sum(not isinstance(each, ast.Starred) for each in call.args)
    if given > len(positional) and parameters.vararg is None:
        return f"takes {len(positional)} positional arguments, not {given}"
    known = {None, *positional[given:], *(each.arg for each in parameters.kwonlyargs)}
    if parameters.kwarg is None and (unknown := keywords - known):
        return f"takes no {', '.join(sorted(map(str, unknown)))}"
    needed = positional[given : max(given, len(positional) - len(parameters.defaults))]
    needed += [
        each.arg for each, value in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True) if value is None
    ]
    lacking = [name for name in needed if name not in keywords]
    spread = None in keywords or given < len(call.args)
    return f"needs {', '.join(lacking)}" if lacking and not spread else ""


def rejected_parameters(ours: ast.arguments, theirs: ast.arguments) -> str:
    """Return the parameters of an overridden method that the pack's method does not accept; empty if it accepts all."""
    taken = {each.arg for each in (*ours.posonlyargs, *ours.args, *ours.kwonlyargs)}
    wanted = [each.arg for each in (*theirs.posonlyargs, *theirs.args[not theirs.posonlyargs :], *theirs.kwonlyargs)]
    lacking = [name for name in wanted if name not in taken and not (ours.vararg or ours.kwarg)]
    return f"gets {', '.join(lacking)}, which the pack's method does not accept" if lacking else ""


@functools.cache
def parsed(file: str) -> ast.Module:
    """Return the syntax tree of a file, empty if the file cannot be read."""
    return parse(file) or ast.Module([], [])


@functools.cache
def definitions_in(file: str) -> Mapping[str, Sequence[Definition]]:
    """Return the functions and classes of a file by qualified name."""
    return definitions(parsed(file))


@functools.cache
def set_outside(file: str, kind: str) -> frozenset[str]:
    """Return the attributes that a file sets on a class of its own outside the class's body."""
    stores = (
        each for each in ast.walk(parsed(file)) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
    )
    return frozenset(
        each.attr for each in stores if isinstance(each.value, ast.Name) and each.value.id in (kind, "cls")
    )


def uses_of_pack() -> list[Use]:
    """Return all uses of ComfyUI in the pack's files, and the ComfyUI functions that the pack replaces."""
    folders = (REPO / "nodes", REPO / "parallel_backend")
    files = [REPO / "__init__.py", *(path for folder in folders for path in sorted(folder.rglob("*.py")))]
    found = [use for path in files for use in uses_in(path.read_bytes(), path.relative_to(REPO).as_posix())]
    absent = {name for each in tables() for name, digest in each.replaced.items() if digest == ABSENT}
    return found + [
        Use(str(each), f"replaced_functions.py, {each.kind}", "replaced", None, str(each) in absent)
        for each in REPLACED_FUNCTIONS
    ]


def changed(tree: Tree) -> list[str]:
    """Return the replaced functions and the functions that they use whose source differs from all tested versions."""
    known: dict[str, set[str]] = {}
    for name, digest in (item for each in tables() for item in each.functions.items()):
        known.setdefault(name, set()).add(digest)

    def is_known(name: str) -> bool:
        module, names = tree.split(name)
        file = tree(module) if module else None
        nodes = definitions_in(file).get(".".join(names), ()) if file else ()
        return any(digest_of(node) in known[name] for node in nodes)

    return sorted(name for name in known if not is_known(name))


def report(folder: Path, uses: Sequence[Use]) -> tuple[str, int]:
    """Return the Markdown page for the ComfyUI in a folder, and the number of required uses that do not bind."""
    tree = Tree(folder)
    faults = [(use, fault) for use in uses if (fault := tree.fault(use))]
    rows = []
    for kind, title in KINDS.items():
        names = [use.name for use in uses if use.kind == kind]
        counts = [sum((use.kind, use.optional) == (kind, optional) for use, _ in faults) for optional in (False, True)]
        rows.append((title, *map(str, (len({*names}), len(names), *counts))))
    text = f"# What the pack uses of ComfyUI {comfyui_name(folder)}\n\n{table(HEAD, rows)}"
    for title, optional in (("Does not bind", False), ("Does not bind, and is optional", True)):
        places: dict[tuple[str, str], dict[str, None]] = {}
        for use, fault in faults:
            if use.optional is optional:
                places.setdefault((f"`{use.name}`", fault), {})[use.where] = None
        if places:
            text += f"\n## {title}\n\n{table(('name', 'problem', 'where'), ((*of, ', '.join(at)) for of, at in places.items()))}"
    if new := changed(tree):
        named = ", ".join(f"`{name}`" for name in new)
        text += (
            "\n## Differs from every tested version\n\nThe pack tries these functions on the user's machine before it "
        )
        text += f"relies on them: {named}.\n"
    return text, sum(not use.optional for use, _ in faults)


def main() -> int:
    """Print the page of the ComfyUI whose folder is the argument."""
    text, faults = report(Path(sys.argv[1]).resolve(), uses_of_pack())
    print(text, end="")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
