"""What a model does that there is no word for, and what is said then."""

from __future__ import annotations

from ..errors import Refused


class Undescribed(Exception):
    """A reason why no declaration says what a model does, to stand behind "because"."""

    lasting = True
    """Whether it lies in the model and its calls alone."""


class Unproved(Undescribed):
    """What fits a model was not proved to hold: it does not, or its ranks failed, as they may for want of time or memory."""

    lasting = False


def not_derived(kind: str, reason: str) -> Refused:
    """For a class without a proved declaration."""
    return Refused(
        f"{kind} cannot be derived, because {reason}: write its declaration by hand (docs/develop/adding-a-model.md), "
        "or run it whole."
    )
