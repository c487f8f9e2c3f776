"""Checks that the class of a loaded model gives the same result on several devices as on one: by digest, or by a proof.

A separate child process proves a small model (`parallel_backend/models/comfyui/proof`). The plain call is proved while the
loader's graph goes on. The graph's own kind of input is proved at the first sampling, before any weight is read.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.model_management

from ...parallel_backend.errors import Refused
from ...parallel_backend.host import Deadlines
from ...parallel_backend.host.proofs import Prover, Sources, key_of, verdict_of
from ...parallel_backend.host.workers.versions import own_comfyui_version
from ...parallel_backend.models.comfyui.config import ComfyConfig
from ...parallel_backend.models.comfyui.content.known import TrialVerdict, same_files, tables, verdict_cache, versions
from ...parallel_backend.models.comfyui.content.model_code import sources_of
from ...parallel_backend.models.comfyui.proof.request import ProofRequest, chosen, class_name
from ...parallel_backend.models.comfyui.small.graph_inputs import GraphInputs
from ...parallel_backend.models.comfyui.small.kinds import KINDS, cases_of
from .trials import FOLDER, report_of_equal

LOOK = 0.05
"""Seconds between two checks of ComfyUI's Cancel."""

ONE_GPU = "one GPU in Parallel Plan, "
"""The part of the advice of AnotherResult that holds only for models that can run unsharded."""

log = logging.getLogger(__name__)


class AnotherResult(Refused):
    """A model's class gives another result on several devices than on one.

    Attributes:
        split: the fault of the class's declared split, in words.
        unsharded_reason: the note for a run that is unsharded because of the fault.
    """

    __module__ = "builtins"

    def __init__(self, sentence: str, *, split: str, unsharded_reason: str) -> None:
        super().__init__(sentence)
        self.split, self.unsharded_reason = split, unsharded_reason


@dataclass
class ClassProof:
    """The proof of one call of a small model: its verdict, or the reason why the proof failed to run, once either is known."""

    key: str
    request: ProofRequest
    verdict: TrialVerdict | None = None
    failure: str = ""
    reported: bool = False


class Proofs:
    """The proofs of the ComfyUI in this process.

    Args:
        folder: ComfyUI's folder.
        cache_folder: the folder for verdicts; None for the default cache folder.
    """

    def __init__(self, folder: Path, cache_folder: Path | None = None) -> None:
        self._seconds = Deadlines.read(os.environ).proof
        self._folder, self._cache, self._tables = folder, verdict_cache(cache_folder), tables()
        self._sources: dict[str, Sources] = {}
        self._proofs: dict[str, ClassProof] = {}
        self._done = threading.Condition()

    def begin(self, config: Any, model: Any) -> None:
        """Start the proof of a loaded model's plain call, unless its verdict is known. Return without waiting.

        Args:
            config: the family's configuration.
            model: the diffusion model, on the meta device.
        """
        self._proofs_of(config, model, [None])

    def check(self, config: Any, model: Any, calls: Sequence[GraphInputs], say: Callable[[str], None]) -> list[str]:
        """Wait for the proofs of a model with the graph's inputs, and return the new notes for the user.

        Args:
            config, model: as in `begin`.
            calls: the graph's inputs of the model, for each kind of call.
            say: called with a text when the method has to wait.

        Raises:
            AnotherResult: the model's result differs.
            InterruptProcessingException: the user pressed ComfyUI's Cancel.
        """
        proofs = self._proofs_of(config, model, [None, *calls])
        once = functools.cache(say)
        return [*dict.fromkeys(sentence for proof in proofs for sentence in self._outcome(proof, once))]

    def _proofs_of(self, config: Any, model: Any, calls: Sequence[GraphInputs | None]) -> list[ClassProof]:
        """Start the proofs of some calls. Return none if the model is unsharded, derived, or of a tested version."""
        if not isinstance(config, ComfyConfig) or config.declaration is None or config.kind not in KINDS:
            return []
        name = class_name(type(model))
        if name not in self._sources:
            self._sources[name] = sources_of(model, self._folder)
        sources, configuration = self._sources[name], config.described.unet_config
        if same_files(sources, self._tables):
            return []
        plain = cases_of(config.kind, configuration)[0]
        requests = [
            ProofRequest(config.kind, plain, name, chosen(configuration), None if inputs is None else dict(inputs))
            for inputs in calls
        ]
        with self._done:
            proofs = [
                self._proofs.get(key) or ClassProof(key, request)
                for request in requests
                for key in [key_of(request, sources)]
            ]
            new = [proof for proof in proofs if proof.key not in self._proofs]
            for proof in new:
                self._proofs[proof.key] = proof
                proof.verdict = self._cache.read(proof.key)
                proof.reported = proof.verdict is not None
        missing = [proof for proof in new if proof.verdict is None]
        if missing:
            threading.Thread(target=self._prove, args=(missing,), daemon=True).start()
        return proofs

    def _prove(self, proofs: Sequence[ClassProof]) -> None:
        """Prove the requests in order in a child process; runs in a thread. If the child ends early, the rest fail."""
        failure = ""
        waiting = list(proofs)
        try:
            for watched in Prover(str(self._folder), [proof.request for proof in proofs], self._seconds).answers():
                proof, answer = waiting.pop(0), watched.answer
                failure = "" if answer.refused else answer.failure
                log.info(
                    "Parallel: %s (%s) on ComfyUI %s: %s, %.1f s, %d MiB",
                    proof.request.kind, proof.request.case, own_comfyui_version(), answer.failure or answer.errors,
                    answer.seconds, watched.memory >> 20,
                )  # fmt: skip
                verdict = None if failure else verdict_of(proof.request, answer, own_comfyui_version())
                if verdict is not None:
                    self._cache.write(proof.key, verdict)
                self._tell(proof, verdict, failure)
        except OSError as error:
            failure = str(error)
        finally:
            for proof in waiting:
                self._tell(proof, None, failure or "its process failed")

    def _tell(self, proof: ClassProof, verdict: TrialVerdict | None, failure: str) -> None:
        with self._done:
            proof.verdict, proof.failure = verdict, failure
            self._done.notify_all()

    def _outcome(self, proof: ClassProof, say: Callable[[str], None]) -> Iterator[str]:
        kind, of = proof.request.kind, f"ComfyUI {own_comfyui_version()}"
        with self._done:
            if proof.verdict is None and not proof.failure:
                say(f"Checking {kind} on {of}, once")
            while proof.verdict is None and not proof.failure:
                comfy.model_management.throw_exception_if_processing_interrupted()
                self._done.wait(LOOK)
        if proof.verdict is not None and proof.verdict.mismatch:
            mismatch = proof.verdict.mismatch
            raise AnotherResult(
                f"{kind} of {of} gives a different result on several devices than on one, {mismatch}: use {ONE_GPU}Load "
                f"Diffusion Model, or a tested ComfyUI ({versions(self._tables)}).",
                split=f"this pack's split of the model gives a different result with {of}, {mismatch}",
                unsharded_reason=f"{kind} runs unsharded on one device: with {of} it gives a different result on several "
                f"devices, {mismatch}.",
            )
        if proof.reported:
            return
        proof.reported = True
        if proof.failure:
            yield (
                f"{kind} of {of} could not be checked on several devices ({proof.failure}): compare a picture with Load "
                "Diffusion Model's."
            )
        else:
            yield report_of_equal([kind])


@functools.cache
def proofs() -> Proofs:
    """Return the proofs of this ComfyUI process."""
    return Proofs(FOLDER)
