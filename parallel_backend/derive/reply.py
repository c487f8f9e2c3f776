"""`python -m parallel_backend.derive.reply FILE`: derive a declaration for ComfyUI, and print the reply as one line.

`parallel_backend.host.deriving` starts this separate process. It imports ComfyUI without packs, and ends when its input closes.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from ..declaration import Declaration
from ..errors import Refused
from ..models.comfyui.importing import import_comfyui
from ..models.comfyui.proof.child import NICE, end_with_the_asker
from ..models.comfyui.proof.ranks import in_a_line
from .call_kind import CallKind
from .calls import Subject
from .derive import Derived, first_proved, proved, proved_compiled
from .measuring import with_costs
from .prompt import PromptExample, subject_of_prompt
from .reduced_config import derived_reduced
from .request import DeriveReply, DeriveRequest, read_request
from .rules import Undescribed
from .small import KEEPINGS, Small, small_of


def main(file: Path) -> None:
    """Print the reply to the request in a file."""
    os.nice(NICE)
    torch.set_num_threads(1)  # ranks are forked from this process
    threading.Thread(target=end_with_the_asker, daemon=True).start()
    answers, sys.stdout = sys.stdout, sys.stderr  # keeps ComfyUI's prints out of the reply
    print(msgspec.json.encode(answer(file)).decode(), file=answers, flush=True)


def answer(file: Path) -> DeriveReply:
    """Return the reply to the request in a file. Any failure becomes a reply too."""
    begun = time.monotonic()
    try:
        import_comfyui()
        logging.getLogger().setLevel(logging.WARNING)
        question, prompts = read_request(file)
        small, pairs = _small(question, prompts)
        subjects = [subject for subject, _ in pairs]
        proved_so = (
            _known(subjects, question.known, question.seconds)
            or derived_reduced(small, subjects, functools.partial(_subjects, prompts), question.seconds)
            or first_proved(subjects, question.seconds)
        )
        derived = with_costs(small, subjects, proved_so)
        compiled = proved_compiled(subjects, derived, question.seconds)
    except Undescribed as reason:
        return DeriveReply(time.monotonic() - begun, failure=str(reason), lasting=reason.lasting)
    except Refused as refusal:
        return DeriveReply(time.monotonic() - begun, failure=str(refusal).rstrip("."))
    except Exception as error:  # an unknown class may raise anything
        return DeriveReply(time.monotonic() - begun, failure=in_a_line(error))
    kinds = tuple(kind for _, kind in pairs)
    proofs = (derived.proof, compiled) if compiled.holds else (derived.proof,)
    proof_text = ", ".join(each.in_words() for each in proofs)
    return DeriveReply(time.monotonic() - begun, derived.declaration, kinds, proof_text, compiled=compiled.holds)


@torch.inference_mode()
def _small(question: DeriveRequest, prompts: Sequence[PromptExample]) -> tuple[Small, list[tuple[Subject, CallKind]]]:
    """Return a small model, with a subject and the kind of call for each prompt.

    Raises:
        Undescribed: as `subject_of_prompt` does, for every setting in `KEEPINGS`.
    """
    reason: Undescribed | None = None
    for members_per_list in KEEPINGS:
        small = small_of(Path(question.file), question.limit, members_per_list)
        try:
            return small, [subject_of_prompt(small, prompt) for prompt in prompts]
        except Undescribed as failed:
            reason = reason or failed
    assert reason is not None
    raise reason


def _subjects(prompts: Sequence[PromptExample], small: Small) -> list[Subject]:
    """Return the calls of these prompts for another small model."""
    return [subject_of_prompt(small, prompt)[0] for prompt in prompts]


def _known(subjects: Sequence[Subject], known: Sequence[Declaration], limit: float) -> Derived | None:
    """Return the first known declaration that is proved for these calls too, or None."""
    for declaration in known:
        with contextlib.suppress(Undescribed):
            tried = proved(subjects, declaration, limit)
            if tried.proof.holds:
                return tried
    return None


if __name__ == "__main__":
    main(Path(sys.argv[1]))
