"""Known code of ComfyUI: a table of digests for each tested version, and the verdicts of trials on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from ....cache import DiskCache

FOLDER = Path(__file__).parent / "tested"


class VersionTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The digests of one version of ComfyUI, written by `python -m …content`.

    Attributes:
        how: "tested" if the tests ran against the version; "read" if a person read the changes and found none that matters.
        files: the digest of each file with replaced functions and of each file of a declared model, by path.
        replaced: the digest of each replaced function with all functions that it calls.
        functions: the digest of each single function. A message names the function that has changed.
    """

    version: str
    how: Literal["tested", "read"]
    files: dict[str, str]
    replaced: dict[str, str] = msgspec.field(name="things")
    functions: dict[str, str]


def tables(folder: Path = FOLDER) -> tuple[VersionTable, ...]:
    """Return the tables of all tested versions."""
    return tuple(msgspec.json.decode(path.read_bytes(), type=VersionTable) for path in sorted(folder.glob("*.json")))


def versions(known_tables: Iterable[VersionTable]) -> str:
    """Return the names of versions, for a sentence."""
    return ", ".join(table.version for table in known_tables)


def write(table: VersionTable, folder: Path = FOLDER) -> Path:
    """Write a table into its file, and return the file's path."""
    path = folder / f"{table.version}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")
    return path


def same_files(files: Sequence[tuple[str, str]], known_tables: Iterable[VersionTable]) -> bool:
    """Return True if one version has all of these files. Each is a path and a digest."""
    return any(all(table.files.get(path) == digest for path, digest in files) for table in known_tables)


class TrialVerdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of a trial of functions of one kind, or of a model class, that no table has.

    Attributes:
        comfyui: the version of ComfyUI with these functions.
        mismatch: a clause that follows the functions' names; empty if their result equals the workers' result.
    """

    kind: str
    functions: tuple[str, ...]
    comfyui: str
    mismatch: str = msgspec.field(default="", name="fault")


def verdict_cache(folder: Path | None = None) -> DiskCache[TrialVerdict]:
    """Return the verdicts of this machine, by a key of everything that a verdict depends on. Default: the cache folder."""
    return DiskCache("verdict", TrialVerdict, folder)
