"""What a model does that there is no word for, and what is said then."""

from __future__ import annotations

from ..errors import Refused


class Undescribed(Exception):
    """A reason why no declaration says what a model does, to stand behind "because"."""


def not_derived(kind: str, reason: str) -> Refused:
    """For a class of which no declaration is proved."""
    return Refused(
        f"{kind} cannot be derived, because {reason}: write its declaration by hand (docs/adding-a-model.md), or run it whole."
    )
