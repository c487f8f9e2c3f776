"""What a proof of a model class comes to: a verdict, kept under the digests of all that it depends on."""

from __future__ import annotations

import torch

from ..identity import code_digest
from ..models.comfyui.content.known import TrialVerdict
from ..models.comfyui.proof.prove import TOLERANCE
from ..models.comfyui.proof.request import ProofReply, ProofRequest, off

Sources = tuple[tuple[str, str], ...]
"""Files with their digests."""


def key_of(request: ProofRequest, sources: Sources) -> str:
    """Return the key of a verdict: everything that the verdict depends on."""
    configuration = sorted((request.configuration or {}).items())
    inputs = sorted((request.inputs or {}).items())
    parts = (
        request.kind,
        request.case,
        request.model,
        configuration,
        inputs,
        sources,
        code_digest(),
        torch.__version__,
    )
    return "\n".join(["model class", *map(str, parts)])


def verdict_of(request: ProofRequest, answer: ProofReply, comfyui: str) -> TrialVerdict:
    """Return the verdict for an answer with errors, or for a model that the workers refuse.

    The mismatch names the worst split with its error, or the refused feature without the remedy.
    """
    if answer.refused:
        mismatch = f"or none, because {answer.failure.rpartition(': ')[0] or answer.failure}"
    else:
        split, error = answer.worst
        mismatch = (
            "" if error <= TOLERANCE else f"which is {off(error)} under {split}, where {TOLERANCE:.0e} is allowed"
        )
    return TrialVerdict(request.kind, (f"{request.kind} ({request.case})",), comfyui, mismatch)
