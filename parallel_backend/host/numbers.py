"""Watching the numbers that come back: a picture of NaN is black, and worth an error instead."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import NotFinite


def check_finite(tensor: Tensor, when: str, compute_dtype: str) -> None:
    """Raise NotFinite where a tensor (on the CPU: nothing waits for a GPU here) holds NaN or infinity.

    Args:
        when: what it is the output of, such as "step 3".
        compute_dtype: what the model computes in, which tells the likely cause.
    """
    wrong = int((~torch.isfinite(tensor)).sum())
    if wrong == 0:
        return
    if compute_dtype == "float16":
        remedy = (
            "fp16 overflows in this model: compute in bf16 or fp32 (a ModelComputeDtype node, or another weight_dtype)"
        )
    else:
        remedy = (
            "the model's file is damaged (download it again), a LoRA is too strong (lower its strength), or the sampler's "
            "sigmas are not numbers"
        )
    raise NotFinite(
        f"{when}: the model's output holds {wrong} values of {tensor.numel()} that are NaN or infinite, computed in "
        f"{compute_dtype}: likely {remedy}."
    )
