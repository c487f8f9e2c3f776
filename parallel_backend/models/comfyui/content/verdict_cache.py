"""What became of trying functions and model classes that no tested version of ComfyUI has: kept on disk, under their digests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from ....cache import DiskCache


class TrialVerdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of the functions of one kind, or of a model class, in a ComfyUI of this version.

    `fault` is what is wrong with them, behind their name; empty where they give what the workers give.
    """

    kind: str
    functions: tuple[str, ...]
    comfyui: str
    fault: str = ""


def kept(key: str, attempt: Callable[[], TrialVerdict], folder: Path | None = None) -> tuple[TrialVerdict, bool]:
    """The verdict under a key, and whether it is a new one: then it has been found, and is kept if it can be."""
    before = found(key, folder)
    if before is not None:
        return before, False
    verdict = attempt()
    keep(key, verdict, folder)
    return verdict, True


def found(key: str, folder: Path | None = None) -> TrialVerdict | None:
    """The verdict under a key; None if there is none."""
    return _store(folder).read(key)


def keep(key: str, verdict: TrialVerdict, folder: Path | None = None) -> None:
    """Keep a verdict if that can be."""
    _store(folder).write(key, verdict)


def all_kept(folder: Path | None = None) -> tuple[TrialVerdict, ...]:
    """All verdicts of this machine, the newest last."""
    return _store(folder).all()


def _store(folder: Path | None) -> DiskCache[TrialVerdict]:
    return DiskCache("verdict", TrialVerdict, folder)
