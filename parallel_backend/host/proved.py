"""What a proof of a model class comes to: a verdict, kept under the digests of all that it depends on."""

from __future__ import annotations

import torch

from ..identity import code_digest
from ..models.comfyui.content.verdict_cache import TrialVerdict
from ..models.comfyui.proof.prove import TOLERANCE
from ..models.comfyui.proof.request import ProofReply, ProofRequest, off

Sources = tuple[tuple[str, str], ...]
"""Files with their digests."""


def key_of(asked: ProofRequest, sources: Sources) -> str:
    """What a verdict depends on."""
    configuration = sorted((asked.configuration or {}).items())
    inputs = sorted((asked.inputs or {}).items())
    parts = (asked.kind, asked.case, asked.model, configuration, inputs, sources, code_digest(), torch.__version__)
    return "\n".join(["model class", *map(str, parts)])


def verdict_of(asked: ProofRequest, answer: ProofReply, comfyui: str) -> TrialVerdict:
    """The verdict that an answer with numbers, or of a model that workers refuse, comes to.

    The fault names the worst split, with its figure, or what is refused, without what to do about it.
    """
    if answer.refused:
        fault = f"or none, because {answer.failure.rpartition(': ')[0] or answer.failure}"
    else:
        split, error = answer.worst
        fault = "" if error <= TOLERANCE else f"which is {off(error)} under {split}, where {TOLERANCE:.0e} is allowed"
    return TrialVerdict(asked.kind, (f"{asked.kind} ({asked.case})",), comfyui, fault)
