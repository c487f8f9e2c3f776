"""Checks for NaN and infinity in the results. A picture of NaN is black, so the user gets an error instead."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from ...errors import NotFinite
from ...plan import ResolvedPlan
from ...wire.frames import Frame


def check_finite(tensor: Tensor, when: str, compute_dtype: str) -> None:
    """Raise NotFinite if a tensor holds NaN or infinity.

    Args:
        tensor: on the CPU, so that nothing waits for a GPU here.
        when: the origin of the tensor, in words such as "step 3".
        compute_dtype: the dtype in which the model computes, which tells the likely cause.
    """
    wrong = int((~torch.isfinite(tensor)).sum())
    if wrong == 0:
        return
    raise NotFinite(
        f"{when}: the model's output holds {wrong} values of {tensor.numel()} that are NaN or infinite, computed in "
        f"{compute_dtype}",
        f": likely {_model_cause(compute_dtype)}.",
    )


def check_sampled(latent: Tensor, when: str, sigmas: Tensor, compute_dtype: str) -> None:
    """Raise NotFinite if a latent that a sampler's step has made holds NaN or infinity.

    Args:
        latent: on the CPU.
        when: as for `check_finite`.
        sigmas: noise levels of the whole denoise, 1-D.
        compute_dtype: the dtype in which the model computes.
    """
    wrong = int((~torch.isfinite(latent)).sum())
    if wrong == 0:
        return
    if problem := odd_sigmas(sigmas):
        cause = f"the sigmas {problem}: this sampler needs sigmas that fall with every step and end at 0 or above it"
    else:
        cause = f"{_model_cause(compute_dtype)}; or a setting of the sampler is too large"
    raise NotFinite(
        f"{when}: the sampler's step gives {wrong} values of {latent.numel()} that are NaN or infinite",
        f", likely because {cause}.",
    )


class FiniteCheck:
    """A check of each message of one denoise for NaN and infinity.

    Args:
        sigmas: noise levels of the whole denoise, `[steps + 1]`, on the CPU.
        compute_dtype: the dtype that the model computes in.

    Attributes:
        messages: the number of messages that were checked; the final latent counts as one.
    """

    def __init__(self, sigmas: Tensor, compute_dtype: str) -> None:
        self.messages = 0
        self._sigmas = sigmas
        self._compute_dtype = compute_dtype

    def __call__(self, frame: Frame) -> None:
        """Check a step's tensors, or the final latent. Raises NotFinite."""
        self.messages += 1
        steps = len(self._sigmas) - 1
        if "result" in frame.tensors:
            check_sampled(frame.tensors["result"], f"Step {steps} of {steps}", self._sigmas, self._compute_dtype)
            return
        step = frame.message.step
        check_sampled(frame.tensors["x"], f"Step {max(1, step)} of {steps}", self._sigmas, self._compute_dtype)
        check_finite(frame.tensors["denoised"], f"Step {step + 1} of {steps}", self._compute_dtype)


def caused_by_pipefusion(error: NotFinite, plan: ResolvedPlan) -> NotFinite:
    """Return an error that blames PipeFusion instead of the model file.

    Args:
        error: the error of a denoise under `plan`; the same denoise without PipeFusion gave finite numbers.
    """
    return NotFinite(
        error.finding,
        f", under {plan.degrees} and not under {plan.without_pipefusion().degrees}: PipeFusion does not work with "
        "this model and these inputs; set pipefusion to 1, and report the workflow.",
    )


def odd_sigmas(sigmas: Tensor) -> str:
    """Return the first place where sigmas do not fall to 0 or above it, in words, or an empty string if they all do."""
    values = [float(sigma) for sigma in sigmas]
    for before, after in pairwise(values):
        if not before > after >= 0 or math.isinf(before):
            return f"go from {before:g} to {after:g}"
    return ""


def _model_cause(compute_dtype: str) -> str:
    if compute_dtype == "float16":
        return (
            "fp16 overflows in this model: compute in bf16 or fp32 (a ModelComputeDtype node, or another weight_dtype)"
        )
    return "the model's file is damaged (download it again), or a LoRA is too strong (lower its strength)"
