"""The replaced functions of the ComfyUI in this process: the code that each reaches, its digest, and the versions with it."""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Literal

from ....source_code import layers_of, syntax_digest, uses_of
from .files import changed_since, file_digest
from .known import VersionTable, same_files, tables
from .replaced_functions import REPLACED_FUNCTIONS, Kind, ReplacedFunction

FOLLOWED = (
    "comfy.samplers",
    "comfy.k_diffusion",
    "comfy.extra_samplers",
    "comfy.model_sampling",
    "comfy.weight_adapter",
)
"""Modules whose functions are a part of any function that calls them. In other modules, only functions of the same file are."""

LIBRARIES = frozenset({"torch", "einops", "numpy", "scipy", "torchsde", "tqdm", *sys.stdlib_module_names})
"""Packages whose functions are trusted in every version."""

CONSTANT = bool, int, float, complex, str, type(None)

ABSENT = "absent"
"""The digest of a function that a ComfyUI does not have."""


@dataclass(frozen=True)
class UnknownFunction:
    """A replaced function whose code is in no tested version.

    Attributes:
        function: the name of the function that differs: the replaced function, or one that it calls.
        digest: the digest of the replaced function and all functions that it calls. It is empty if there is no digest, or if
            another pack has replaced a function.
        reason: a clause that follows the function's name.
    """

    replaced: ReplacedFunction
    function: str
    digest: str
    reason: str = "which differs from all tested versions"


@dataclass(frozen=True)
class FunctionDigests:
    """The digest of a replaced function with all that it calls, and the digest of each of these functions, by name."""

    digest: str
    functions: Mapping[str, str]


@dataclass(frozen=True)
class ReachedFunctions:
    """The code that a replaced function consists of.

    Attributes:
        functions: by name, with the name of the module that defines them.
        constants: numbers and strings of modules that the functions use, as source text.
        foreign: names that another pack has bound to a function of its own.
        missing: True if this ComfyUI does not have the replaced function.
    """

    functions: dict[str, FunctionType] = field(default_factory=dict)
    constants: dict[str, str] = field(default_factory=dict)
    foreign: list[str] = field(default_factory=list)
    missing: bool = False


class SourceDigestCheck:
    """A comparison of the replaced functions of the imported ComfyUI with the tables of tested versions.

    Args:
        folder: ComfyUI's folder.
        known_tables: by default the tables of all tested versions.
    """

    def __init__(self, folder: Path, known_tables: Sequence[VersionTable] | None = None) -> None:
        self._folder = folder
        self._tables = tables() if known_tables is None else known_tables
        self._walk = FunctionWalk(folder)
        self._judged: dict[ReplacedFunction, tuple[frozenset[int], UnknownFunction | None]] = {}
        self._files: dict[str, str] = {}

    def unknown(self, kinds: Iterable[Kind], only: Collection[str] = ()) -> list[UnknownFunction]:
        """Return the unknown functions of these kinds. Each call compares again, because packs replace functions as they load.

        Args:
            only: the names of the functions to compare; by default all of the kinds.
        """
        judged = (
            self.judge(function)
            for function in REPLACED_FUNCTIONS
            if function.kind in kinds and (not only or str(function) in only)
        )
        return [each for each in judged if each is not None]

    def table(self, version: str, how: Literal["tested", "read"]) -> VersionTable:
        """Return the table of the imported ComfyUI."""
        reached = {function: self._walk.reached_by(function) for function in REPLACED_FUNCTIONS}
        measured = {function: self.digests(function) for function in REPLACED_FUNCTIONS}
        files = {path: file_digest(self._folder / path) for each in reached.values() for path in self._paths(each)}
        functions = {name: digest for each in measured.values() for name, digest in each.functions.items()}
        replaced = {str(function): each.digest for function, each in measured.items()}
        return VersionTable(version, how, *(dict(sorted(each.items())) for each in (files, replaced, functions)))

    def digests(self, replaced: ReplacedFunction) -> FunctionDigests:
        """Return the digests of a replaced function, as it is in this process."""
        reached = self._walk.reached_by(replaced)
        if reached.missing:
            return FunctionDigests(ABSENT, {})
        functions = {name: syntax_digest(each.__code__) for name, each in sorted(reached.functions.items())}
        parts = [*functions.items(), *sorted(reached.constants.items())]
        return FunctionDigests(hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest(), functions)

    def judge(self, function: ReplacedFunction) -> UnknownFunction | None:
        """Return the reason why a function of ComfyUI is not known; None if a table has its digest.

        The function need not be a replaced one.
        """
        reached = self._walk.reached_by(function)
        if reached.foreign:
            return UnknownFunction(function, reached.foreign[0], "", "which is another pack's")
        key = frozenset(id(code_owner.__code__) for code_owner in reached.functions.values())
        before = self._judged.get(function)
        if before is None or before[0] != key:
            self._judged[function] = before = key, self._compare_with_tables(function, reached)
        return before[1]

    def _compare_with_tables(self, replaced: ReplacedFunction, reached: ReachedFunctions) -> UnknownFunction | None:
        name = str(replaced)
        modules = {path: module for path in self._paths(reached) if (module := self._module(path)) is not None}
        if changed := changed_since(modules, self._folder):
            return UnknownFunction(replaced, name, "", f"whose file {changed[0]} has changed since ComfyUI was started")
        if modules and same_files([(path, self._file(path)) for path in modules], self._tables):
            return None
        measured = self.digests(replaced)
        if any(table.replaced.get(name) == measured.digest for table in self._tables):
            return None
        if reached.missing:
            return UnknownFunction(replaced, name, "", "which this ComfyUI does not have")
        known = {item for table in self._tables for item in table.functions.items()}
        changed_functions = [each for each, digest in measured.functions.items() if (each, digest) not in known]
        function = name if not changed_functions or name in changed_functions else changed_functions[0]
        return UnknownFunction(replaced, function, measured.digest if all(measured.functions.values()) else "")

    def _paths(self, reached: ReachedFunctions) -> list[str]:
        files = {function.__code__.co_filename for function in reached.functions.values()}
        return sorted(Path(file).relative_to(self._folder).as_posix() for file in files)

    def _module(self, path: str) -> ModuleType | None:
        return self._walk.module(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))

    def _file(self, path: str) -> str:
        if path not in self._files:
            self._files[path] = file_digest(self._folder / path)
        return self._files[path]


class FunctionWalk:
    """A search for the code that functions and classes of a ComfyUI reach. It imports no module.

    Args:
        folder: ComfyUI's folder.
        stops: names that are not followed, because they are judged by themselves.
    """

    def __init__(self, folder: Path, stops: Collection[str] = frozenset(map(str, REPLACED_FUNCTIONS))) -> None:
        self._folder = folder
        self._stops = stops

    def reached_by(self, replaced: ReplacedFunction) -> ReachedFunctions:
        """Return the code that a replaced function reaches, except other replaced functions."""
        value: Any = self.module(replaced.module)
        for name in replaced.name.split("."):
            value = None if value is None else inspect.getattr_static(value, name, None)
        if value is None:
            return ReachedFunctions(missing=True)
        return self.reached_from(str(replaced), value, replaced.module)

    def reached_from(self, name: str, value: Any, home: str) -> ReachedFunctions:
        """Return the code that a function or class reaches.

        Args:
            home: the module of the value, in which the functions that it calls are a part of it.
        """
        reached = ReachedFunctions()
        seen: set[int] = set()
        waiting = [(name, value)]
        while waiting:
            name, value = waiting.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            waiting.extend(self._parts_of(name, value, home, reached))
        return reached

    def module(self, name: str) -> ModuleType | None:
        """Return ComfyUI's module of this name. ComfyUI imports modules of nodes under other names."""
        if name in sys.modules:
            return sys.modules[name]
        file = str(self._folder.joinpath(*name.split(".")).with_suffix(".py"))
        return next((each for each in [*sys.modules.values()] if getattr(each, "__file__", None) == file), None)

    def _parts_of(self, name: str, value: Any, home: str, reached: ReachedFunctions) -> Iterator[tuple[str, Any]]:
        """Add a function or class to the reached code, and yield all functions and classes that it consists of and uses."""
        if isinstance(value, type):
            yield from ((f"{name}.{part}", each) for part, each in vars(value).items() if _is_called(each))
            yield from ((self._name_of(base), base) for base in value.__bases__ if self._is_followed(base, home))
            return
        for function in layers_of(value):
            module = self._dotted(function.__code__.co_filename)
            if module is None:
                if function.__globals__.get("__name__", "").partition(".")[0] not in LIBRARIES:
                    reached.foreign.append(name)
                continue
            reached.functions[name] = function
            yield from self._used(function, module, home, reached)

    def _used(
        self, function: FunctionType, module: str, home: str, reached: ReachedFunctions
    ) -> Iterator[tuple[str, Any]]:
        uses = uses_of(function.__code__)
        spaces: list[tuple[str, Mapping[str, Any], Set[str]]] = [(module, function.__globals__, uses.globals)]
        seen: set[str] = set()
        while spaces:
            space, names, used = spaces.pop()
            if space in seen:
                continue
            seen.add(space)
            inside = self._inside(space, home)
            for name in sorted(used & names.keys()):
                value, full = names[name], f"{space}.{name}"
                if isinstance(value, ModuleType):
                    if value.__name__.partition(".")[0] in ("comfy", "comfy_extras"):
                        spaces.append((value.__name__, vars(value), uses.names))
                elif full not in self._stops and _is_called(value) and self._is_followed(value, home):
                    yield self._name_of(value), value
                elif isinstance(value, CONSTANT) and inside and not name.startswith("__"):
                    reached.constants[full] = repr(value)
                elif _is_called(value) and inside and self._is_foreign(value):
                    reached.foreign.append(full)

    def _is_followed(self, value: Any, home: str) -> bool:
        module = self._comfyui_module(value)
        return module is not None and self._inside(module, home)

    def _inside(self, module: str, home: str) -> bool:
        return module == home or module.startswith(FOLLOWED)

    def _is_foreign(self, value: Any) -> bool:
        """Return True if neither ComfyUI nor a library defines a callable object."""
        package = str(getattr(value, "__module__", None) or type(value).__module__).partition(".")[0]
        return self._comfyui_module(value) is None and package not in LIBRARIES | {"", "builtins"}

    def _comfyui_module(self, value: Any) -> str | None:
        """Return the module of ComfyUI's that defines a function or class; None if ComfyUI does not."""
        if isinstance(value, type):
            return self._dotted(getattr(sys.modules.get(value.__module__), "__file__", None))
        functions = [*layers_of(value)]
        return self._dotted(functions[-1].__code__.co_filename) if functions else None

    def _name_of(self, value: Any) -> str:
        inner = value if isinstance(value, type) else [*layers_of(value)][-1]
        return f"{self._comfyui_module(value)}.{inner.__qualname__}"

    @functools.cache  # noqa: B019 (as many as there are files)
    def _dotted(self, file: str | None) -> str | None:
        """Return the module's name for a file of ComfyUI's; None for other files."""
        if file is None or not file.startswith(f"{self._folder}/comfy"):
            return None
        return ".".join(Path(file).relative_to(self._folder).with_suffix("").parts).removesuffix(".__init__")


def _is_called(value: Any) -> bool:
    return isinstance(value, type | staticmethod | classmethod | property) or callable(value)
