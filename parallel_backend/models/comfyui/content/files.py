"""ComfyUI's files by content: whether two processes have the same, and whether this one has what lies on the disk."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import psutil

from .replaced_functions import REPLACED_FUNCTIONS

PACKAGE = "comfy"
"""What workers import of ComfyUI, but for single functions of its nodes."""

OF_NODES = frozenset(
    f"{function.module.replace('.', '/')}.py"
    for function in REPLACED_FUNCTIONS
    if not function.module.startswith("comfy.")
)
"""The files of nodes that single functions are imported from."""

SHORT = 4
"""Bytes that a file takes in what ranks tell."""


@functools.cache
def own_files(folder: str) -> bytes:
    """What a process tells of the files in ComfyUI's folder: a few bytes for each, the same wherever it is the same.

    They are read once in a process, so that they are those which it has imported.
    """
    root = Path(folder)
    paths = {path.relative_to(root).as_posix() for path in (root / PACKAGE).rglob("*.py")} | OF_NODES
    return b"".join(sorted(_short(path, digest_of(root / path)) for path in paths))


def other_file(modules: Iterable[str], folder: Path, digests: bytes) -> str | None:
    """The first of these files in ComfyUI's folder, by their paths, that is another one where `digests` comes from."""
    theirs = {digests[start : start + SHORT] for start in range(0, len(digests), SHORT)}
    return next((path for path in sorted(modules) if _short(path, digest_of(folder / path)) not in theirs), None)


def _short(path: str, digest: str) -> bytes:
    return hashlib.blake2b(f"{path} {digest}".encode(), digest_size=SHORT).digest()


def digest_of(path: Path) -> str:
    """Twelve hexadecimal digits of a file's text; empty for none."""
    try:
        text = path.read_bytes()
    except OSError:
        return ""
    return hashlib.blake2b(text.replace(b"\r\n", b"\n"), digest_size=6).hexdigest()


def imported(folder: Path) -> dict[str, ModuleType]:
    """The modules of ComfyUI's package in this process, by the paths of their files."""
    modules: dict[str, ModuleType] = {}
    for module in [*sys.modules.values()]:
        file = getattr(module, "__file__", None)
        if isinstance(module, ModuleType) and file is not None and file.startswith(f"{folder}/{PACKAGE}"):
            path = Path(file).relative_to(folder).as_posix()
            if path in OF_NODES or path.startswith(f"{PACKAGE}/"):
                modules[path] = module
    return modules


def changed_since(modules: Mapping[str, ModuleType], folder: Path, started: float | None = None) -> list[str]:
    """The files, by their paths, that hold other code now than these modules have been made of.

    Args:
        started: when this process was, in seconds since the epoch; asked by default.
    """
    begun = psutil.Process().create_time() if started is None else started
    return [path for path, module in modules.items() if _touched(folder / path, begun) and _differs(module)]


def _touched(path: Path, since: float) -> bool:
    """Whether anything has been done to a file since; no tool can set this time back."""
    try:
        return path.stat().st_ctime > since
    except OSError:
        return True


def _differs(module: ModuleType) -> bool:
    """Whether a module's functions are not those of its file, in the same places."""
    file = str(module.__file__)
    try:
        there = {*_codes(compile(Path(file).read_bytes(), file, "exec", dont_inherit=True))}
    except (OSError, SyntaxError, ValueError):
        return True
    return not there.issuperset(function.__code__ for function in _functions(module, file))


def _functions(module: ModuleType, file: str) -> Iterator[FunctionType]:
    values = [*vars(module).values()]
    values += [part for value in values if isinstance(value, type) for part in vars(value).values()]
    for value in values:
        inner: Any = getattr(value, "__func__", value)
        if isinstance(inner, FunctionType) and inner.__code__.co_filename == file:
            yield inner


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
