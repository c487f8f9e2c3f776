"""Derive: a model's declaration, found from outside and proved."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from msgspec.structs import replace

from ..declaration import Declaration, InterleavedBlocks
from ..models.comfyui.reduced import lengthen
from ..models.sequence_parallel.picture import as_patch_size
from .calls import ModelCall, Sizes, Subject
from .deriving import candidates
from .proof import COMPILED, COMPILER, IN_PATCHES, WHOLE, DeclarationProof, prove
from .rules import Undescribed, Unproved, not_derived

LIMIT = 120.0
"""Seconds for a plan's proof."""


@dataclass(frozen=True)
class Derived:
    """A declaration that was proved, and the proof."""

    declaration: Declaration
    proof: DeclarationProof


@torch.inference_mode()
def derive(subjects: Sequence[Subject], limit: float = LIMIT) -> Derived:
    """A model's declaration, found by the first kind of its calls and proved for all of them.

    Of those that fit what is seen of the model it is the first that holds under every plan; if none does, the first that holds
    where the picture is not cut into patches.

    Args:
        subjects: the same model, with a kind of call each.
        limit: seconds for a plan's proof.

    Raises:
        Refused: nothing that is known fits, or nothing that fits holds.
    """
    try:
        return first_proved(subjects, limit)
    except Undescribed as reason:
        raise not_derived(type(subjects[0].model).__name__, str(reason)) from None


@torch.inference_mode()
def proved(subjects: Sequence[Subject], declaration: Declaration, limit: float = LIMIT) -> Derived:
    """A declaration that is known, tried for kinds of calls; its proof may not hold. Raises Undescribed: no call can be made."""
    return _proved(subjects, declaration, WHOLE if declaration.whole_picture else {**WHOLE, **IN_PATCHES}, limit)


@torch.inference_mode()
def proved_compiled(subjects: Sequence[Subject], derived: Derived, limit: float = LIMIT) -> DeclarationProof:
    """Prove a derived declaration again, with its blocks compiled."""
    return _proved(subjects, derived.declaration, COMPILED, limit, COMPILER).proof


@torch.inference_mode()
def first_proved(subjects: Sequence[Subject], limit: float = LIMIT) -> Derived:
    """As `derive`. Raises Undescribed: with the reason."""
    failed: DeclarationProof | None = None
    whole: Derived | None = None
    for declaration in candidates(subjects[0]):
        derived = _proved(subjects, declaration.sent(), {**WHOLE, **IN_PATCHES}, limit)
        if derived.proof.holds:
            return derived
        failed = failed or derived.proof
        if whole is None and derived.proof.holds_for(WHOLE):
            uncut = _proved(subjects, replace(declaration, whole_picture=True), WHOLE, limit)
            whole = uncut if uncut.proof.holds else None
    if whole is not None:
        return whole
    assert failed is not None, "some declaration fits, or the reason was raised"
    raise Unproved(f"what fits it was not proved: {failed.in_words()}")


def _proved(
    subjects: Sequence[Subject],
    declaration: Declaration,
    plans: Mapping[str, Mapping[str, int]],
    limit: float,
    compiler: str = "",
) -> Derived:
    if isinstance(declaration.units, InterleavedBlocks):
        # What blocks of the other list leave to each other is proved with two of them.
        lengthen(subjects[0].model, declaration.units.path, declaration.units.second_position + 1)
    calls = [call for subject in subjects for call in _calls(subject, declaration)]
    return Derived(declaration, prove(subjects[0], declaration, calls, plans, limit, compiler))


def _calls(subject: Subject, declaration: Declaration) -> list[ModelCall]:
    """The call that is asked about, and one of another size that the model takes, if it takes any.

    The other size does not divide into tokens where the model pads, and is twice as high and wide where the model takes no such
    one; it has two rows where calls of several can be made and the model takes them.
    """
    *frames, height, width = subject.sizes.picture
    *_, high, wide = as_patch_size(declaration.patch_size(subject.model), len(subject.sizes.picture) + 2)
    odd = 0 if declaration.divisible_latent else 1

    larger = (height + 2 * high - odd * (high > 1), width + wide), (2 * height, 2 * width)
    for rows, picture in itertools.product((2, 1) if subject.batches else (1,), larger):
        larger_call = subject.call(Sizes((*frames, *picture), subject.sizes.text + 2, rows))
        if larger_call.fits(subject.model):
            break
    return [subject.call(subject.sizes), larger_call]
