"""Numbers of a sampling run of which no picture comes: refused before anything starts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...parallel_backend.errors import Refused


def refuse_sigmas(sigmas: Tensor, cfg: float, model_sampling: Any) -> None:
    """Look at the numbers of which ComfyUI's own samplers make NaN or infinity, whatever the model says.

    Args:
        sigmas: 1-D, at least one.
        model_sampling: the MODEL's, which scales the last latent by the last sigma.

    Raises:
        Refused: there is one.
    """
    if not math.isfinite(cfg):
        raise Refused(f"the cfg is {cfg}, of which no picture comes: set it to a number such as 1.")
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
