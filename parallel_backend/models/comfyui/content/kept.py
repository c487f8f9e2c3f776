"""What became of trying functions and model classes that no tested version of ComfyUI has: kept on disk, under their digests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from ....plan.predict.measure import cache_folder


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of the functions of one kind, or of a model class, in a ComfyUI of this version.

    `fault` is what is wrong with them, behind their name; empty where they give what the workers give.
    """

    kind: str
    functions: tuple[str, ...]
    comfyui: str
    fault: str = ""


def kept(key: str, attempt: Callable[[], Verdict], folder: Path | None = None) -> tuple[Verdict, bool]:
    """The verdict under a key, and whether it is a new one: then it has been found, and is kept if it can be."""
    before = found(key, folder)
    if before is not None:
        return before, False
    verdict = attempt()
    keep(key, verdict, folder)
    return verdict, True


def found(key: str, folder: Path | None = None) -> Verdict | None:
    """The verdict under a key; None if there is none."""
    try:
        return msgspec.json.decode(_path(key, folder).read_bytes(), type=Verdict)
    except (OSError, msgspec.MsgspecError):
        return None


def keep(key: str, verdict: Verdict, folder: Path | None = None) -> None:
    """Keep a verdict if that can be."""
    path = _path(key, folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_suffix(f".{id(verdict)}")
        own.write_bytes(msgspec.json.encode(verdict))
        own.replace(path)
    except OSError:  # a read-only home: it is tried again next time
        pass


def _path(key: str, folder: Path | None) -> Path:
    return (folder or cache_folder()) / f"verdict-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def all_kept(folder: Path | None = None) -> tuple[Verdict, ...]:
    """All verdicts of this machine, the newest last."""
    paths = [*(folder or cache_folder()).glob("verdict-*.json")]
    verdicts = []
    for path in sorted(paths, key=lambda each: each.stat().st_mtime):
        try:
            verdicts.append(msgspec.json.decode(path.read_bytes(), type=Verdict))
        except (OSError, msgspec.MsgspecError):
            continue
    return tuple(verdicts)
