"""The doctor's check of ComfyUI's declared model classes, by proofs on small models."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ..derive.declaration_cache import DeclarationRecord
from ..derive.request import DeriveReply
from ..host import Deadlines
from ..host.proofs import Prover, Watched
from ..models.comfyui.proof.prove import TOLERANCE
from ..models.comfyui.proof.request import ProofRequest, off
from ..models.comfyui.small.kinds import KINDS, all_cases
from .findings import Finding, FindingStatus

MIB = 1 << 20

WRONG = (
    "This model runs unsharded until the pack finds another way to split it: plans that need a split wait until then, or are "
    "refused."
)
NOT_MADE = "Compare a picture with Load Diffusion Model's."


def diagnose_models(
    folder: str, report: Callable[[str], None] = lambda what: None, kinds: Sequence[str] = tuple(KINDS)
) -> list[Finding]:
    """Return a finding for each class. Child processes import the folder's ComfyUI; every class takes a few seconds.

    Args:
        folder: ComfyUI's folder.
        report: called with the name and number of each class when its proof begins.
        kinds: the classes; by default all declared classes.
    """
    there = classes_in(Path(folder))
    requests = [ProofRequest(kind, case) for kind in kinds if kind in there for case in all_cases(kind)]
    answers_by_kind: dict[str, list[tuple[ProofRequest, Watched]]] = {kind: [] for kind in kinds}
    for request, watched in _proved(
        folder, requests, lambda kind: report(f"{kind}, {[*kinds].index(kind) + 1} of {len(kinds)}")
    ):
        answers_by_kind[request.kind].append((request, watched))
    return [
        finding_of(kind, answers)
        if kind in there
        else Finding(kind, FindingStatus.OK, "this ComfyUI has no such class")
        for kind, answers in answers_by_kind.items()
    ]


def classes_in(folder: Path) -> frozenset[str]:
    """Return the names of the model classes in a ComfyUI folder."""
    return frozenset(re.findall(r"^class (\w+)", (folder / "comfy" / "supported_models.py").read_text("utf-8"), re.M))


def _proved(
    folder: str, requests: Sequence[ProofRequest], begin: Callable[[str], None]
) -> Iterator[tuple[ProofRequest, Watched]]:
    """Yield each request with its answer. Start another child if one ends before its last request."""
    pending = [*requests]
    while pending:
        begin(pending[0].kind)
        for watched in Prover(folder, pending, Deadlines.read(os.environ).proof).answers():
            yield pending.pop(0), watched
            if pending:
                begin(pending[0].kind)


def finding_of(kind: str, answers: Sequence[tuple[ProofRequest, Watched]]) -> Finding:
    """Return the finding for a class from the replies to its requests."""
    seconds = sum(watched.answer.seconds for _, watched in answers)
    cost = f"{len(answers)} inputs, {seconds:.1f} s, {max(watched.memory for _, watched in answers) // MIB} MiB"
    errors: Mapping[str, tuple[str, float]] = {
        request.case: watched.answer.worst for request, watched in answers if watched.answer.errors
    }
    wrong = [f"{case}: {off(error)} under {split}" for case, (split, error) in errors.items() if not error <= TOLERANCE]
    wrong += [f"{request.case}: {watched.answer.failure}" for request, watched in answers if watched.answer.refused]
    if wrong:
        return Finding(kind, FindingStatus.FAILURE, "; ".join([*wrong, cost]), WRONG)
    failed = [f"{request.case}: {watched.answer.failure}" for request, watched in answers if watched.answer.failure]
    if failed:
        return Finding(kind, FindingStatus.WARNING, "; ".join([*failed, cost]), NOT_MADE)
    return Finding(kind, FindingStatus.OK, f"{cost}, at most {max(error for _, error in errors.values()):.1e} off")


def of_derived(classes: Iterable[DeclarationRecord]) -> list[Finding]:
    """Return a finding for each derived class: its declaration, or the reason why it runs unsharded. Skip duplicates."""
    findings = [
        Finding(record.kind, FindingStatus.OK, _text_of(record, answer))
        for record in classes
        for answer in record.answers
    ]
    return [*dict.fromkeys(findings)]


def _text_of(known: DeclarationRecord, answer: DeriveReply) -> str:
    if answer.declaration is None:
        return f"in ComfyUI {known.comfyui} it runs unsharded, because {answer.failure}"
    kinds = "one kind" if len(answer.kinds) == 1 else f"{len(answer.kinds)} kinds"
    return f"in ComfyUI {known.comfyui} the pack worked out how to split {kinds} of calls: {answer.proof}"
