"""Derive: a model's declaration, found from outside and proved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ..models.spread.declaration import Declaration
from ..models.spread.picture import as_patch_size
from .calls import ModelCall, Sizes, Subject
from .deriving import candidates
from .proof import IN_PATCHES, WHOLE, Proof, prove
from .undescribed import Undescribed, not_derived
from .writing import read, source_of

LIMIT = 120.0
"""Seconds for a plan's proof."""


@dataclass(frozen=True)
class Derived:
    """A declaration that was proved: its Python, what that says, and the proof."""

    source: str
    declaration: Declaration
    proof: Proof


@torch.inference_mode()
def derive(subject: Subject, name: str, remarks: str, limit: float = LIMIT) -> Derived:
    """A model's declaration, as the variable `name` of a module of `models/declared/`.

    Of those that fit what is seen of the model it is the first that holds under every plan; if none does, the first that holds
    where the picture is not cut into patches. What holds is what the Python says.

    Raises:
        Refused: nothing that is known fits, or nothing that fits holds.
    """
    try:
        return _first_proved(subject, name, remarks, limit)
    except Undescribed as reason:
        raise not_derived(type(subject.model).__name__, str(reason)) from None


def _first_proved(subject: Subject, name: str, remarks: str, limit: float) -> Derived:
    failed: Proof | None = None
    whole: Derived | None = None
    for found in candidates(subject):
        derived = _proved(subject, found, name, remarks, {**WHOLE, **IN_PATCHES}, limit)
        if derived.proof.holds:
            return derived
        failed = failed or derived.proof
        if whole is None and derived.proof.holds_for(WHOLE):
            uncut = _proved(subject, replace(found, whole_picture=True), name, remarks, WHOLE, limit)
            whole = uncut if uncut.proof.holds else None
    if whole is not None:
        return whole
    assert failed is not None, "some declaration fits, or the reason was raised"
    raise Undescribed(f"what fits it was not proved: {failed.told()}")


def _proved(
    subject: Subject, found: Declaration, name: str, remarks: str, plans: Mapping[str, Mapping[str, int]], limit: float
) -> Derived:
    source = source_of(name, found, f"{remarks}; proved under {', '.join(plans)}.")
    declaration = read(name, source)
    return Derived(source, declaration, prove(subject, declaration, _calls(subject, declaration), plans, limit))


def _calls(subject: Subject, declaration: Declaration) -> list[ModelCall]:
    """The call that is asked about, and one of another size, which does not divide into tokens where the model pads."""
    *frames, height, width = subject.sizes.picture
    *_, high, wide = as_patch_size(declaration.patch_size(subject.model), len(subject.sizes.picture) + 2)
    odd = 0 if declaration.divides else 1
    other = Sizes((*frames, height + 2 * high - odd * (high > 1), width + wide), subject.sizes.text + 2)
    return [subject.call(subject.sizes), subject.call(other)]
