"""The disk cache of derived declarations, keyed by digests of everything on which the result depends."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from ..cache import DiskCache
from ..declaration import Declaration
from ..identity import code_digest
from .call_kind import CallKind
from .request import DeriveReply

MOST_KINDS = 8
"""Number of kinds of calls to keep for one file. The newest kinds stay."""

NOT_THE_FILES = ("dtype", "device", "operations")
"""Configuration entries that are not properties of the model."""


class DeclarationRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The replies for a class, the newest last. `kind` and `comfyui` are only for human readers."""

    kind: str
    comfyui: str
    answers: tuple[DeriveReply, ...] = ()

    def found(self, kinds: Collection[CallKind]) -> DeriveReply | None:
        """Return the newest reply with a declaration that holds for all these kinds of calls."""
        return next(
            (each for each in reversed(self.answers) if each.declaration and not difference(each.kinds, kinds)), None
        )

    def failed(self, kinds: Collection[CallKind]) -> DeriveReply | None:
        """Return the newest reply that gives a reason why no declaration holds for these kinds."""
        return next(
            (each for each in reversed(self.answers) if each.failure and not difference(kinds, each.kinds)), None
        )

    def with_answer(self, answer: DeriveReply) -> DeclarationRecord:
        """Return the record with one more reply, without superfluous replies and without those beyond `MOST_KINDS`."""
        other_answers = [each for each in self.answers if each.declaration != answer.declaration]
        same = [each for each in self.answers if answer.declaration and each.declaration == answer.declaration]
        kinds = [kind for each in (*same, answer) for kind in each.kinds]
        compiled = answer.compiled and all(each.compiled for each in same)
        merged = msgspec.structs.replace(answer, kinds=tuple(dict.fromkeys(kinds))[-MOST_KINDS:], compiled=compiled)
        answers = [*(other_answers if answer.declaration else self.answers), merged]
        while sum(len(each.kinds) for each in answers) > MOST_KINDS and len(answers) > 1:
            answers = answers[1:]
        return msgspec.structs.replace(self, answers=tuple(answers))

    @property
    def declarations(self) -> tuple[Declaration, ...]:
        """Return all proved declarations, the newest first."""
        return tuple(each.declaration for each in reversed(self.answers) if each.declaration)


def difference(known: Collection[CallKind], kinds: Collection[CallKind]) -> str:
    """Return in words how the first unknown kind differs from the known ones; empty if all kinds are known."""
    for kind in kinds:
        differences = [each.difference(kind) for each in known]
        if all(differences):
            return differences[0] if differences else "calls of any kind"
    return ""


def key_of(kind: str, configuration: Mapping[str, Any], sources: Sequence[tuple[str, str]]) -> str:
    """Return the cache key, from the class, its detected configuration, its sources, this pack's code, and torch's version."""
    settings = sorted((name, str(value)) for name, value in configuration.items() if name not in NOT_THE_FILES)
    return "\n".join(["derived", kind, *map(str, (settings, tuple(sources), code_digest(), torch.__version__))])


def load(key: str, folder: Path | None = None) -> DeclarationRecord | None:
    """Return the record under a key, or None. A damaged file counts as missing, and the log reports it."""
    return _store(folder).read(key)


def save(key: str, record: DeclarationRecord, folder: Path | None = None) -> None:
    """Write the record to disk if the folder is writable."""
    _store(folder).write(key, record)


def all_records(folder: Path | None = None) -> tuple[DeclarationRecord, ...]:
    """Return the records of all classes of this machine, the newest last."""
    return _store(folder).all()


def _store(folder: Path | None) -> DiskCache[DeclarationRecord]:
    return DiskCache("derived", DeclarationRecord, folder)
