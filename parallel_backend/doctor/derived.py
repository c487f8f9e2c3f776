"""What is known of classes that nobody declared, as findings."""

from __future__ import annotations

from collections.abc import Iterable

from ..derive.declaration_cache import DeclarationRecord
from ..derive.request import DeriveReply
from .findings import Finding, FindingStatus


def of_derived(classes: Iterable[DeclarationRecord]) -> list[Finding]:
    """What each was proved to be split by, or why it is not; what was found twice the same, as by two versions, is said once."""
    found = [Finding(each.kind, FindingStatus.OK, _said(each, answer)) for each in classes for answer in each.answers]
    return [*dict.fromkeys(found)]


def _said(known: DeclarationRecord, answer: DeriveReply) -> str:
    if answer.declaration is None:
        return f"in ComfyUI {known.comfyui} it runs whole, because {answer.failure}"
    kinds = "one kind" if len(answer.kinds) == 1 else f"{len(answer.kinds)} kinds"
    return f"in ComfyUI {known.comfyui} the pack worked out how to split {kinds} of calls: {answer.proof}"
