"""Comparison of ComfyUI's files by content: between two processes, and between imported code and the files on disk."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import psutil

from ....source_code import codes_in
from .replaced_functions import REPLACED_FUNCTIONS

PACKAGE = "comfy"
"""The package of ComfyUI that workers import, besides single functions of its nodes."""

OF_NODES = frozenset(
    f"{function.module.replace('.', '/')}.py"
    for function in REPLACED_FUNCTIONS
    if not function.module.startswith("comfy.")
)
"""The files of nodes that single functions are imported from."""

SHORT = 4
"""The number of bytes of a file's digest among the facts about a rank."""


@functools.cache
def own_files(folder: str) -> bytes:
    """Return short digests of the files in ComfyUI's folder, for the comparison with another process.

    The files are read once in a process, near its start, so that they are the files which the process has imported.
    """
    root = Path(folder)
    paths = {path.relative_to(root).as_posix() for path in (root / PACKAGE).rglob("*.py")} | OF_NODES
    return b"".join(sorted(_short(path, file_digest(root / path)) for path in paths))


def other_file(modules: Iterable[str], folder: Path, digests: bytes) -> str | None:
    """Return the path of the first file that differs from another process's; None if all are equal.

    Args:
        modules: the paths of the files, in ComfyUI's folder.
        digests: the other process's `own_files`.
    """
    theirs = {digests[start : start + SHORT] for start in range(0, len(digests), SHORT)}
    return next((path for path in sorted(modules) if _short(path, file_digest(folder / path)) not in theirs), None)


def _short(path: str, digest: str) -> bytes:
    return hashlib.blake2b(f"{path} {digest}".encode(), digest_size=SHORT).digest()


def file_digest(path: Path) -> str:
    """Return twelve hexadecimal digits of a file's text; empty if there is no such file."""
    try:
        text = path.read_bytes()
    except OSError:
        return ""
    return hashlib.blake2b(text.replace(b"\r\n", b"\n"), digest_size=6).hexdigest()


def imported(folder: Path) -> dict[str, ModuleType]:
    """Return the modules of ComfyUI's package in this process, by the paths of their files."""
    modules: dict[str, ModuleType] = {}
    for module in [*sys.modules.values()]:
        file = getattr(module, "__file__", None)
        if isinstance(module, ModuleType) and file is not None and file.startswith(f"{folder}/{PACKAGE}"):
            path = Path(file).relative_to(folder).as_posix()
            if path in OF_NODES or path.startswith(f"{PACKAGE}/"):
                modules[path] = module
    return modules


def changed_since(modules: Mapping[str, ModuleType], folder: Path, started: float | None = None) -> list[str]:
    """Return the paths of the files that now hold other code than these modules were imported from.

    Args:
        started: the start of this process in seconds since the epoch; by default the system's record.
    """
    begun = psutil.Process().create_time() if started is None else started
    return [path for path, module in modules.items() if _touched(folder / path, begun) and _differs(module)]


def _touched(path: Path, since: float) -> bool:
    """Return True if a file may have changed since a time. No tool can set a file's ctime back."""
    try:
        return path.stat().st_ctime > since
    except OSError:
        return True


def _differs(module: ModuleType) -> bool:
    """Return True if a module has a function that its file does not define at the same line."""
    file = str(module.__file__)
    try:
        in_file = {*codes_in(compile(Path(file).read_bytes(), file, "exec", dont_inherit=True))}
    except (OSError, SyntaxError, ValueError):
        return True
    return not in_file.issuperset(function.__code__ for function in _functions(module, file))


def _functions(module: ModuleType, file: str) -> Iterator[FunctionType]:
    values = [*vars(module).values()]
    values += [part for value in values if isinstance(value, type) for part in vars(value).values()]
    for value in values:
        inner: Any = getattr(value, "__func__", value)
        if isinstance(inner, FunctionType) and inner.__code__.co_filename == file:
            yield inner
