"""The ComfyUIs that this pack was tested with, by content: one table for each, written by `python -m …content`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

FOLDER = Path(__file__).parent / "tested"


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A version of ComfyUI.

    `how` says whether the tests ran against it, or someone has read what changed and found nothing that matters. `files` has
    the digests of the files in which the things lie and of those that declared models consist of, `things` those of their
    syntax and all that they call, and `functions` those of single functions, which name one that has changed.
    """

    version: str
    how: Literal["tested", "read"]
    files: dict[str, str]
    things: dict[str, str]
    functions: dict[str, str]


def tables(folder: Path = FOLDER) -> tuple[Table, ...]:
    """The tables of all tested ComfyUIs, the files of a folder."""
    return tuple(msgspec.json.decode(path.read_bytes(), type=Table) for path in sorted(folder.glob("*.json")))


def versions(known_tables: Iterable[Table]) -> str:
    """The versions, for a sentence."""
    return ", ".join(table.version for table in known_tables)


def write(table: Table, folder: Path = FOLDER) -> Path:
    """Write a table into its file."""
    path = folder / f"{table.version}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")
    return path


def same_files(files: Sequence[tuple[str, str]], known_tables: Iterable[Table]) -> bool:
    """Whether all of these files, each a path and a digest, are those of one version."""
    return any(all(table.files.get(path) == digest for path, digest in files) for table in known_tables)
