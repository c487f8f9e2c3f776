"""Trials: code that the workers replace runs next to its replacement on small random inputs, and must give the same result.

A function of a tested ComfyUI version needs no trial: its source digest is in a table.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import comfy.model_management
import comfy.samplers
import msgspec
import torch
from torch import Tensor

from ...parallel_backend.host.workers.versions import own_comfyui_version
from ...parallel_backend.identity import code_digest
from ...parallel_backend.models.comfyui.content.known import TrialVerdict, tables, verdict_cache, versions
from ...parallel_backend.models.comfyui.content.replaced_functions import REPLACED_FUNCTIONS, Kind, ReplacedFunction
from ...parallel_backend.models.comfyui.content.source_digests import SourceDigestCheck, UnknownFunction
from .conditioning import NotSupported

log = logging.getLogger(__name__)

FOLDER = Path(comfy.samplers.__file__).parents[1]

TOLERANCE = 1e-6
"""Allowed relative L2 error in fp32: both sides compute the same, at most in another order."""

Results = Iterable[tuple[Tensor, Tensor]]
"""The results of a trial: each of the workers' results, with the result of the code that the workers replace."""


def random(seed: int, shape: tuple[int, ...]) -> Tensor:
    """Return standard normal numbers in fp32 on the CPU, equal for equal seeds."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def equal(ours: Tensor, theirs: Tensor, tolerance: float = TOLERANCE) -> bool:
    """Return True if two results have one shape, and the relative L2 error is at most `tolerance`. NaN is never equal."""
    return ours.shape == theirs.shape and float((ours - theirs).norm()) <= tolerance * float(theirs.norm())


@contextmanager
def isolated() -> Iterator[None]:
    """Run a trial without gradients, outside inference mode, and restore the CPU's random generator afterwards."""
    with torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng(devices=[]):
        yield


def all_equal(results: Callable[[], Results], tolerance: float = TOLERANCE) -> bool:
    """Run a trial and return True if all its results are equal.

    Raises:
        RuntimeError: the trial has no result.
    """
    with isolated():
        verdicts = [equal(ours.float(), theirs.float(), tolerance) for ours, theirs in results()]
    if not verdicts:
        raise RuntimeError("the trial has no results to compare")
    return all(verdicts)


def report_of_equal(names: Sequence[str]) -> str:
    """Return the report for the user about code that no tested ComfyUI has, and whose trial gave equal results."""
    difference = "differs" if len(names) == 1 else "differ"
    return (
        f"{', '.join(names)} {difference} from all tested ComfyUI versions. A trial run on this machine gave the same result, "
        "so the fast path stays on."
    )


class NotKnown(NotSupported):
    """A function of this ComfyUI that no tested version has, and whose result differs from the workers' result."""

    def __init__(self, what: str) -> None:
        super().__init__(what, f"a tested ComfyUI ({versions(tables())})")


class Verdicts:
    """The verdicts on replaced functions of the ComfyUI in this process.

    Args:
        folder: the folder for verdicts; None for the default cache folder.
    """

    def __init__(self, content: SourceDigestCheck, folder: Path | None = None) -> None:
        self._content = content
        self._cache = verdict_cache(folder)
        self._known: dict[str, TrialVerdict] = {}
        self._reports: list[str] = []

    def mismatch(
        self,
        kind: Kind,
        results: Callable[[], Results],
        only: Collection[str] = (),
        tolerance: float = TOLERANCE,
    ) -> str | None:
        """Return the first function of a kind that workers cannot replace, with the reason; None if they can replace all.

        Args:
            kind: the kind of functions.
            results: the trial. It runs only if no table has the functions and no verdict on them is cached.
            only: the names of the functions to check; by default all of the kind.
            tolerance: the allowed relative error of the results.
        """
        unknown = self._content.unknown((kind,), only)
        if not unknown:
            return None
        unreadable = next((function for function in unknown if not function.digest), None)
        if unreadable is not None:
            return f"{unreadable.function}, {unreadable.reason}"
        verdict = self._verdict(kind, unknown, functools.partial(all_equal, results, tolerance))
        return f"{verdict.functions[0]}, {verdict.mismatch}" if verdict.mismatch else None

    def mismatch_of(
        self, maker: ReplacedFunction, use: str, results: Callable[[], Results], tolerance: float = TOLERANCE
    ) -> str | None:
        """Return the name of a function factory and the reason why workers cannot run its functions; None if they can.

        A digest does not tell for which use a factory makes a function. So each use is tried in each process. Only verdicts on
        a replaced function that no table has are written to disk and reported.

        Args:
            maker: the factory.
            use: everything besides the factory's code on which the results depend.
            results: the trial.
            tolerance: the allowed relative error of the results.
        """
        unknown = self._content.judge(maker)
        if unknown is not None and not unknown.digest:
            return f"{unknown.function}, {unknown.reason}"
        reported = unknown is not None and maker in REPLACED_FUNCTIONS
        attempt = functools.partial(all_equal, results, tolerance)
        judged = unknown or UnknownFunction(maker, str(maker), "")
        verdict = self._verdict(maker.kind, [judged], attempt, use, reported=reported)
        return f"{verdict.functions[0]}, {verdict.mismatch}" if verdict.mismatch else None

    def unverified(self, kind: Kind) -> bool:
        """Return True if a function of a kind is unknown and no trial found it equal."""
        unknown = self._content.unknown((kind,))
        key = self._key(kind, unknown)
        return bool(unknown) and (key not in self._known or bool(self._known[key].mismatch))

    def reports(self) -> list[str]:
        """Return a sentence for each trial since the last call that found functions equal."""
        reports, self._reports = self._reports, []
        return reports

    def _verdict(
        self,
        kind: Kind,
        unknown: Collection[UnknownFunction],
        attempt: Callable[[], bool],
        use: str = "",
        *,
        reported: bool = True,
    ) -> TrialVerdict:
        key = self._key(kind, unknown, use)
        if key not in self._known:
            names = tuple(dict.fromkeys(function.function for function in unknown))
            verdict = self._cache.read(key) if reported else None
            if verdict is None:
                verdict = TrialVerdict(kind, names, own_comfyui_version())
                try:
                    if not attempt():
                        reason = "whose result differs from the workers' in a trial run"
                        verdict = msgspec.structs.replace(verdict, mismatch=reason)
                    if reported:
                        self._cache.write(key, verdict)
                except comfy.model_management.InterruptProcessingException:
                    raise
                except Exception as error:  # not written to the cache: the next start tries again
                    reason = f"whose trial run failed ({type(error).__name__}: {error})"
                    verdict = msgspec.structs.replace(verdict, mismatch=reason)
                if reported:
                    self._report(verdict)
            self._known[key] = verdict
        return self._known[key]

    def _key(self, kind: Kind, unknown: Collection[UnknownFunction], use: str = "") -> str:
        digests = sorted(f"{function.replaced} {function.digest}" for function in unknown)
        return "\n".join([kind, *digests, *filter(None, [use]), code_digest(), _own_digest(), torch.__version__])

    def _report(self, verdict: TrialVerdict) -> None:
        if verdict.mismatch:
            log.warning(
                "Parallel: the workers cannot replace ComfyUI's %s, %s", ", ".join(verdict.functions), verdict.mismatch
            )
            return
        report = report_of_equal(verdict.functions)
        log.info("Parallel: %s", report)
        self._reports.append(report)


@functools.cache
def verdicts() -> Verdicts:
    """Return the verdicts of this ComfyUI process, which all MODELs share."""
    return Verdicts(SourceDigestCheck(FOLDER))


@functools.cache
def _own_digest() -> str:
    """Return a digest of this pack's own half of the trials."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


class FunctionVerdicts:
    """Verdicts on functions that no digest identifies, such as another pack's; kept in memory as long as the function."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Any, dict[str, str]] = WeakKeyDictionary()

    def clause(self, function: Any, key: str, attempt: Callable[[], str]) -> str:
        """Return the result of a trial: a clause to follow "which", empty if the function may be replaced.

        Args:
            function: the function to replace.
            key: everything besides the function on which the result depends.
            attempt: the trial. It runs once for each function and key.
        """
        try:
            known = self._known.setdefault(function, {})
        except TypeError:  # the function does not support weak references, as C methods do not
            return attempt()
        if key not in known:
            known[key] = attempt()
        return known[key]
