"""What is known of classes that nobody declared, as findings."""

from __future__ import annotations

from collections.abc import Iterable

from ..derive.declaration_cache import DeclarationRecord
from ..derive.request import DeriveReply
from .findings import Finding, FindingStatus


def of_derived(classes: Iterable[DeclarationRecord]) -> list[Finding]:
    """Return a finding for each derived class: its declaration, or why it runs unsharded. Skip duplicates."""
    findings = [
        Finding(record.kind, FindingStatus.OK, _text_of(record, answer))
        for record in classes
        for answer in record.answers
    ]
    return [*dict.fromkeys(findings)]


def _text_of(known: DeclarationRecord, answer: DeriveReply) -> str:
    if answer.declaration is None:
        return f"in ComfyUI {known.comfyui} it runs whole, because {answer.failure}"
    kinds = "one kind" if len(answer.kinds) == 1 else f"{len(answer.kinds)} kinds"
    return f"in ComfyUI {known.comfyui} the pack worked out how to split {kinds} of calls: {answer.proof}"
