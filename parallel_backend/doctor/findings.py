"""What the doctor says."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec


class FindingStatus(enum.Enum):
    """How a thing is. A warning costs speed or may go wrong; with a failure something does not work."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


class Finding(msgspec.Struct, frozen=True):
    """One line; `remedy` is empty where nothing is to be done."""

    name: str
    status: FindingStatus
    text: str
    remedy: str = ""


def table(findings: Sequence[Finding]) -> str:
    """The findings for a terminal."""
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
    """Whether something does not work."""
    return any(finding.status is FindingStatus.FAILURE for finding in findings)
