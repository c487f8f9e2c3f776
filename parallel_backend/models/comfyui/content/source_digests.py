"""Which things of the ComfyUI in this process are those of a version that was tested, and which are not."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from .files import changed_since, digest_of
from .reached import Reached, Walk
from .replaced_functions import REPLACED_FUNCTIONS, Kind, ReplacedFunction
from .syntax import Sources
from .tested import Table, same_files, tables

ABSENT = "absent"
"""The digest of a thing that a ComfyUI has not."""


@dataclass(frozen=True)
class Unknown:
    """A thing that is none of a tested version's.

    Attributes:
        function: which function it was: the thing itself, or one that it calls.
        digest: of the thing and all that it calls; empty where it cannot be told, or another pack has put something there.
        why: what it is, behind the function's name.
    """

    thing: ReplacedFunction
    function: str
    digest: str
    why: str = "which no tested version has like this"


@dataclass(frozen=True)
class FunctionDigests:
    """The digests of a thing and of the functions that it consists of."""

    thing: str
    functions: Mapping[str, str]


class Content:
    """The things of a ComfyUI that is imported here, held against tables."""

    def __init__(self, folder: Path, known: Sequence[Table] | None = None) -> None:
        self._folder = folder
        self._tables = tables() if known is None else known
        self._walk = Walk(folder)
        self._sources = Sources()
        self._judged: dict[ReplacedFunction, tuple[frozenset[int], Unknown | None]] = {}
        self._files: dict[str, str] = {}

    def unknown(self, kinds: Iterable[Kind], only: Collection[str] = ()) -> list[Unknown]:
        """The things of these kinds that are not known; looked at anew, because packs change things as they are loaded.

        Args:
            only: the names of those that are looked at; by default all of the kinds.
        """
        judged = (
            self.judge(function)
            for function in REPLACED_FUNCTIONS
            if function.kind in kinds and (not only or str(function) in only)
        )
        return [each for each in judged if each is not None]

    def table(self, version: str, how: str) -> Table:
        """The table of the ComfyUI that is imported here."""
        reached = {function: self._walk.of(function) for function in REPLACED_FUNCTIONS}
        measured = {function: self.measured(function) for function in REPLACED_FUNCTIONS}
        files = {path: digest_of(self._folder / path) for of in reached.values() for path in self._paths(of)}
        functions = {name: digest for each in measured.values() for name, digest in each.functions.items()}
        digests = {str(function): each.thing for function, each in measured.items()}
        return Table(version, how, *(dict(sorted(each.items())) for each in (files, digests, functions)))  # type: ignore[arg-type]

    def judge(self, function: ReplacedFunction) -> Unknown | None:
        """Return why a function of ComfyUI is not known, also one that is not replaced; None if a table has its digest."""
        reached = self._walk.of(function)
        if reached.foreign:
            return Unknown(function, reached.foreign[0], "", "which is another pack's")
        key = frozenset(id(code_owner.__code__) for code_owner in reached.functions.values())
        before = self._judged.get(function)
        if before is None or before[0] != key:
            self._judged[function] = before = key, self._compare_with_tables(function, reached)
        return before[1]

    def _compare_with_tables(self, replaced: ReplacedFunction, reached: Reached) -> Unknown | None:
        modules = {path: module for path in self._paths(reached) if (module := self._module(path)) is not None}
        if changed := changed_since(modules, self._folder):
            return Unknown(replaced, str(replaced), "", f"of which {changed[0]} has changed since ComfyUI was started")
        if modules and same_files([(path, self._file(path)) for path in modules], self._tables):
            return None
        measured = self.measured(replaced)
        if any(table.things.get(str(replaced)) == measured.thing for table in self._tables):
            return None
        if reached.missing:
            return Unknown(replaced, str(replaced), "", "which this ComfyUI does not have")
        known = {(name, digest) for table in self._tables for name, digest in table.functions.items()}
        changed_functions = [name for name, digest in measured.functions.items() if (name, digest) not in known]
        function = (
            str(replaced) if not changed_functions or str(replaced) in changed_functions else changed_functions[0]
        )
        return Unknown(replaced, function, measured.thing if all(measured.functions.values()) else "")

    def measured(self, replaced: ReplacedFunction) -> FunctionDigests:
        """Return the digests of a replaced function, as it is in this process."""
        reached = self._walk.of(replaced)
        if reached.missing:
            return FunctionDigests(ABSENT, {})
        functions = {name: self._sources.digest(each.__code__) for name, each in sorted(reached.functions.items())}
        parts = [*functions.items(), *sorted(reached.constants.items())]
        return FunctionDigests(hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest(), functions)

    def _paths(self, reached: Reached) -> list[str]:
        files = {function.__code__.co_filename for function in reached.functions.values()}
        return sorted(Path(file).relative_to(self._folder).as_posix() for file in files)

    def _module(self, path: str) -> ModuleType | None:
        return self._walk.module(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))

    def _file(self, path: str) -> str:
        if path not in self._files:
            self._files[path] = digest_of(self._folder / path)
        return self._files[path]
