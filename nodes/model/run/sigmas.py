"""Numbers of a sampling run that give no picture: refused before anything starts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ....parallel_backend.errors import Refused

STRENGTH = re.compile(r"cfg\d*|(cfg|guidance|neg)_scale|guidance")
"""Where guiders keep by how much they guide: CFGGuider, DualCFGGuider, PerpNegGuider and other packs'."""

MOST = math.sqrt(torch.finfo(torch.float32).max)
"""What is guided by more has squares, which models and samplers compute with, that fp32 does not hold."""

TIMES = 1000.0
"""What ComfyUI's models multiply a guidance by before they embed it."""


def refuse_strengths(guider: Any) -> None:
    """Raises Refused where a guider guides by NaN, infinity, or so much that infinity comes of it."""
    for name in ("cfg", *sorted({*vars(guider)} - {"cfg"})):
        value = getattr(guider, name, None) if STRENGTH.fullmatch(name) else None
        if isinstance(value, float | int) and not abs(value) <= MOST:
            raise Refused(f"the {name} is {value:g}, which makes no picture: set it to a number such as 1.")


def refuse_guidance(conditioning: Mapping[str, Tensor]) -> None:
    """Raises Refused where a prompt's guidance, in the dtype that the model computes in, overflows as it is embedded."""
    guidance = conditioning.get("guidance")
    if guidance is not None and not bool(torch.isfinite(guidance * TIMES).all()):
        value = float(guidance.flatten()[0])
        raise Refused(
            f"the guidance is {value:g}, which overflows in {str(guidance.dtype).removeprefix('torch.')}: set it to a number "
            "such as 3.5 in FluxGuidance."
        )


def refuse_sigmas(sigmas: Tensor, model_sampling: Any) -> None:
    """Look for numbers that ComfyUI's own samplers turn into NaN or infinity, whatever the model says.

    Args:
        sigmas: 1-D, at least one.
        model_sampling: the MODEL's, which scales the last latent by the last sigma.

    Raises:
        Refused: there is one.
    """
    wrong = [number for number, sigma in enumerate(sigmas.tolist(), 1) if not math.isfinite(sigma)]
    if wrong:
        raise Refused(
            f"sigma {wrong[0]} of {len(sigmas)} is {sigmas[wrong[0] - 1].item()}: look at the node that the sigmas come from, "
            "and at the shift of a ModelSampling node, which must be above 0."
        )
    if not math.isfinite(model_sampling.inverse_noise_scaling(sigmas[-1].cpu(), torch.ones(1)).item()):
        raise Refused(
            f"the sigmas end at {sigmas[-1].item():g}, where this model's latent is noise alone and cannot be scaled to a "
            "picture's: let them end below that, at 0 for a finished picture."
        )
