"""Whether ComfyUI's functions are what the workers stand in for: known by content, or tried on this machine and found equal."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Collection
from pathlib import Path

import comfy.model_management
import comfy.samplers
import msgspec
import torch

from ...parallel_backend.host.workers.versions import own_comfyui_version
from ...parallel_backend.identity import code_digest
from ...parallel_backend.models.comfyui.content.known import TrialVerdict, tables, verdict_cache, versions
from ...parallel_backend.models.comfyui.content.replaced_functions import Kind
from ...parallel_backend.models.comfyui.content.source_digests import SourceDigestCheck, UnknownFunction
from .conditioning import NotSupported

log = logging.getLogger(__name__)

FOLDER = Path(comfy.samplers.__file__).parents[1]

Attempt = Callable[[], str]
"""Tries ComfyUI's functions beside the workers': gives what is wrong with them, behind their name, or nothing."""


class NotKnown(NotSupported):
    """A function of this ComfyUI that is neither a tested version's nor gives what the workers give."""

    def __init__(self, what: str) -> None:
        super().__init__(what, f"a ComfyUI that was tested ({versions(tables())})")


class Verdicts:
    """Judges the things of the ComfyUI in this process.

    Args:
        folder: where verdicts are kept; by default the cache folder.
    """

    def __init__(self, content: SourceDigestCheck, folder: Path | None = None) -> None:
        self._content = content
        self._cache = verdict_cache(folder)
        self._known: dict[str, TrialVerdict] = {}
        self._reports: list[str] = []

    def fault(self, kind: Kind, attempt: Attempt, only: Collection[str] = ()) -> str | None:
        """Return the first function of a kind that the workers cannot replace, with the reason; None if they can replace
        all.

        Args:
            attempt: what tries them, the first time that some of them are not known.
            only: the names of those that take part; by default all of the kind.
        """
        unknown = self._content.unknown((kind,), only)
        if not unknown:
            return None
        unreadable = next((function for function in unknown if not function.digest), None)
        if unreadable is not None:
            return f"{unreadable.function}, {unreadable.reason}"
        verdict = self._verdict(kind, unknown, attempt)
        return f"{verdict.functions[0]}, {verdict.mismatch}" if verdict.mismatch else None

    def doubtful(self, kind: Kind) -> bool:
        """Return True if a function of a kind is unknown and no trial found it equal."""
        unknown = self._content.unknown((kind,))
        key = self._key(kind, unknown)
        return bool(unknown) and (key not in self._known or bool(self._known[key].mismatch))

    def reports(self) -> list[str]:
        """What was tried since this was last asked, and found equal: a sentence for each."""
        reports, self._reports = self._reports, []
        return reports

    def _verdict(self, kind: Kind, unknown: Collection[UnknownFunction], attempt: Attempt) -> TrialVerdict:
        key = self._key(kind, unknown)
        if key not in self._known:
            names = tuple(dict.fromkeys(function.function for function in unknown))
            verdict = self._cache.read(key)
            if verdict is None:
                verdict = TrialVerdict(kind, names, own_comfyui_version())
                try:
                    verdict = msgspec.structs.replace(verdict, mismatch=attempt())
                    self._cache.write(key, verdict)
                except comfy.model_management.InterruptProcessingException:
                    raise
                except Exception as error:  # not written to the cache: the next start tries again
                    reason = f"which could not be tried ({type(error).__name__}: {error})"
                    verdict = msgspec.structs.replace(verdict, mismatch=reason)
                self._report(verdict)
            self._known[key] = verdict
        return self._known[key]

    def _key(self, kind: Kind, unknown: Collection[UnknownFunction]) -> str:
        digests = sorted(f"{function.replaced} {function.digest}" for function in unknown)
        return "\n".join([kind, *digests, code_digest(), _own_digest(), torch.__version__])

    def _report(self, verdict: TrialVerdict) -> None:
        if verdict.mismatch:
            log.warning("Parallel: ComfyUI's %s, %s", ", ".join(verdict.functions), verdict.mismatch)
            return
        report = f"No tested ComfyUI has {', '.join(verdict.functions)} like this one: tried here, and equal to the workers'."
        log.info("Parallel: %s", report)
        self._reports.append(report)


@functools.cache
def verdicts() -> Verdicts:
    """The verdicts of this ComfyUI process, which all MODELs share."""
    return Verdicts(SourceDigestCheck(FOLDER))


@functools.cache
def _own_digest() -> str:
    """Of this pack's own half of what is tried."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]
