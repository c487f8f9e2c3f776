"""Derive a model's declaration: find candidates by probing the model, and prove one of them."""

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
"""Seconds for the proof of one plan."""


@dataclass(frozen=True)
class Derived:
    """A declaration with its proof."""

    declaration: Declaration
    proof: DeclarationProof


@torch.inference_mode()
def derive(subjects: Sequence[Subject], limit: float = LIMIT) -> Derived:
    """Return a declaration that was found with the first subject's calls and proved for the calls of all subjects.

    The result is the first candidate that holds under every plan. If there is none, the result is the first candidate that
    holds under the plans that do not cut the picture into patches.

    Args:
        subjects: the same model several times, each with another kind of call.
        limit: seconds for the proof of one plan.

    Raises:
        Refused: no candidate fits the model, or the proof of every candidate fails.
    """
    try:
        return first_proved(subjects, limit)
    except Undescribed as reason:
        raise not_derived(type(subjects[0].model).__name__, str(reason)) from None


@torch.inference_mode()
def proved(subjects: Sequence[Subject], declaration: Declaration, limit: float = LIMIT) -> Derived:
    """Return a known declaration with its proof for these calls; the proof may fail. Raises Undescribed if no call works."""
    return _proved(subjects, declaration, WHOLE if declaration.whole_picture else {**WHOLE, **IN_PATCHES}, limit)


@torch.inference_mode()
def proved_compiled(subjects: Sequence[Subject], derived: Derived, limit: float = LIMIT) -> DeclarationProof:
    """Prove a derived declaration again, with its blocks compiled."""
    return _proved(subjects, derived.declaration, COMPILED, limit, COMPILER).proof


@torch.inference_mode()
def first_proved(subjects: Sequence[Subject], limit: float = LIMIT) -> Derived:
    """Return the same as `derive`, but raise Undescribed with the reason instead of Refused."""
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
    raise Unproved(f"the declaration that fits it was not proved: {failed.in_words()}")


def _proved(
    subjects: Sequence[Subject],
    declaration: Declaration,
    plans: Mapping[str, Mapping[str, int]],
    limit: float,
    compiler: str = "",
) -> Derived:
    if isinstance(declaration.units, InterleavedBlocks):
        # With two blocks of the second list, the proof covers the values that they pass to each other.
        lengthen(subjects[0].model, declaration.units.path, declaration.units.second_position + 1)
    calls = [call for subject in subjects for call in _calls(subject, declaration)]
    return Derived(declaration, prove(subjects[0], declaration, calls, plans, limit, compiler))


def _calls(subject: Subject, declaration: Declaration) -> list[ModelCall]:
    """Return the subject's own call and one larger call, of the first larger size that the model accepts.

    If the model pads its latents, the first larger size does not divide into tokens. The next size is twice as high and wide.
    The larger call has two rows if the subject can make calls of several rows and the model accepts them. If the model accepts
    no larger call, the last one is returned anyway.
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
