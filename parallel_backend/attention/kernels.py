"""The choice of an attention kernel. Kernels return the output and the log-sum-exp of the scores (LSE).

Every kernel takes q `[batch, queries, heads, head_dim]`, k and v `[batch, keys, heads, head_dim]`. It returns the output
`[batch, queries, heads, head_dim]` in q's dtype and the LSE `[batch, heads, queries]` in fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from ..errors import PlanRefused
from ..plan import ResolvedPlan
from .packages import (
    FLASH_ATTN,
    FLASH_ATTN_3,
    HALF_DTYPES,
    NO_FAILURES,
    SAGE_ATTENTION,
    TRIAL_SHAPE,
    AttentionKernel,
    KernelPackage,
    kernel_failure,
    package_failures,
)


@dataclass(frozen=True)
class KernelChoice:
    """A value of the plan's `attention` setting.

    Attributes:
        packages: candidates in order; the first that works is used, or else one of torch's own kernels.
        required: refuse the plan if no candidate works.
    """

    packages: tuple[KernelPackage, ...]
    required: bool = False


CHOICES: Mapping[str, KernelChoice] = MappingProxyType(
    {
        "auto": KernelChoice((FLASH_ATTN_3, FLASH_ATTN)),
        "sdpa": KernelChoice(()),
        "flash": KernelChoice((FLASH_ATTN_3, FLASH_ATTN), required=True),
        "sage": KernelChoice((SAGE_ATTENTION,), required=True),
    }
)
"""The choices by the value of the plan's `attention` setting."""

FLASH_HEAD_DIM = 256
"""The largest head_dim that torch's own flash attention takes."""

FLASH_CAPABILITY = (8, 0)
"""The smallest compute capability that torch's own flash attention runs on (Ampere)."""

CUDNN_CAPABILITIES = ((9, 0), (10, 0), (10, 3))
"""Compute capabilities on which cuDNN is the fastest kernel: data-centre Hopper and Blackwell, nearly twice flash-attn 2."""

CUDNN_HEAD_DIM = 128
"""The largest head_dim that cuDNN takes on all of these GPUs."""


@dataclass(frozen=True)
class ChosenKernel:
    """A kernel, its name, and the reason for the choice, for the log."""

    name: str
    reason: str
    attend: AttentionKernel


def choose_kernel(
    choice: str, device: torch.device, dtype: torch.dtype, head_dim: int, failures: Mapping[str, str] = NO_FAILURES
) -> ChosenKernel:
    """Choose the kernel for a device, dtype and head_dim.

    Args:
        choice: the plan's `attention` setting.
        device: the device of the operands.
        dtype: the dtype of the operands.
        head_dim: the width of a head.
        failures: the result of `package_failures` for the device.

    Raises:
        PlanRefused: the choice is unknown, or requires a kernel that cannot run here.
    """
    if choice not in CHOICES:
        raise PlanRefused(f"attention {choice!r} is unknown: use one of {', '.join(CHOICES)}.")
    kernel_choice = CHOICES[choice]
    known_failures = []
    if not kernel_choice.required and _cudnn_fits(device, dtype, head_dim):
        failure = cudnn_failure(device)
        if not failure:
            return ChosenKernel("cudnn", "cuDNN is the fastest on this GPU", _sdpa_cudnn)
        known_failures.append(failure)
    reason = "requested by the plan"
    for package in kernel_choice.packages:
        unsupported = package.unsupported_reason(device, dtype, head_dim)
        reason = failures.get(package.name) or unsupported or ""
        if not reason:
            why = "approximate" if package.approximate else "; ".join(known_failures) or "installed"
            return ChosenKernel(package.name, why, package.attend)
        known_failures += [failures[package.name]] if package.name in failures else []
    reason = "; ".join(known_failures) or reason
    if kernel_choice.required:
        raise PlanRefused(f"attention {choice} cannot be used: {reason}; use auto or sdpa.")
    return ChosenKernel("sdpa", reason, _sdpa(device, dtype, head_dim))


def is_approximate(choice: str) -> bool:
    """Return True if a choice can change the picture slightly."""
    return choice in CHOICES and any(package.approximate for package in CHOICES[choice].packages)


def describe(plan: ResolvedPlan) -> str:
    """Return a short text about a plan for logs, which says if its attention is approximate."""
    return plan.describe(approximate_attention=is_approximate(plan.attention))


@functools.cache
def refused_kernels(device: torch.device) -> Mapping[str, str]:
    """Return the choices that cannot run on this worker's device, each with the sentence of its refusal."""
    refused = {}
    for choice in (name for name, candidate in CHOICES.items() if candidate.required):
        try:
            choose_kernel(choice, device, HALF_DTYPES[0], TRIAL_SHAPE[-1], package_failures(device))
        except PlanRefused as refusal:
            refused[choice] = str(refusal)
    return refused


def warm_up_kernels(device: torch.device) -> None:
    """Make the trial calls of all kernels when the worker starts, so that no step waits for them."""
    package_failures(device)
    if _cudnn_fits(device, torch.bfloat16, CUDNN_HEAD_DIM):
        cudnn_failure(device)


@functools.cache
def cudnn_failure(device: torch.device) -> str:
    """Call cuDNN's attention once on this worker's GPU and return a sentence about its failure; empty if it works."""
    return kernel_failure("cuDNN's attention", _sdpa_cudnn, device)


def _cudnn_fits(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return True if cuDNN supports these operands and is the fastest kernel on the device."""
    if device.type != "cuda" or dtype not in HALF_DTYPES or head_dim % 8 or head_dim > CUDNN_HEAD_DIM:
        return False
    return torch.cuda.get_device_capability(device) in CUDNN_CAPABILITIES


def _is_older(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) < FLASH_CAPABILITY


def _sdpa(device: torch.device, dtype: torch.dtype, head_dim: int) -> AttentionKernel:
    """Return torch's own kernel for a device; on a GPU flash attention if it supports the operands."""
    if device.type == "cpu":
        return _sdpa_cpu
    flash = dtype in HALF_DTYPES and head_dim % 8 == 0 and head_dim <= FLASH_HEAD_DIM and not _is_older(device)
    return _sdpa_flash if flash else _sdpa_efficient


def _sdpa_cpu(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    return out.transpose(1, 2), lse


def _sdpa_flash(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[:2]
    return out.transpose(1, 2), lse


def _sdpa_cudnn(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if min(q.shape[1], k.shape[1]) < 2:  # cuDNN needs two tokens
        return _sdpa_flash(q, k, v)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)[:2]
    return out.transpose(1, 2), lse.reshape(q.shape[:3])


def _sdpa_efficient(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True)[:2]
    return out.transpose(1, 2), lse[..., : q.shape[2]]  # this kernel pads the LSE to a multiple of its block
