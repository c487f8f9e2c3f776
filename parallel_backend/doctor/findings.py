"""The doctor's findings, and their table for a terminal."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec


class FindingStatus(enum.Enum):
    """The status of a finding. A warning costs speed or may go wrong; a failure means that something does not work."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


class Finding(msgspec.Struct, frozen=True):
    """One finding of the doctor; `remedy` is empty if there is nothing to do."""

    name: str
    status: FindingStatus
    text: str
    remedy: str = ""


def table(findings: Sequence[Finding]) -> str:
    """Return the findings as a text table for a terminal."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        first, *more = finding.text.splitlines()
        lines.append(f"{finding.status.value:<8} {finding.name:<{width}}  {first}")
        lines += [f"{'':<8} {'':<{width}}  {line}" for line in more]
        if finding.remedy:
            lines.append(f"{'':<8} {'':<{width}}  -> {finding.remedy}")
    return "\n".join(lines)


def failed(findings: Sequence[Finding]) -> bool:
    """Return True if a finding is a failure."""
    return any(finding.status is FindingStatus.FAILURE for finding in findings)
