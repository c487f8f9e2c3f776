"""Attention kernels that return the output and its log-sum-exp, and the choice among them.

Every kernel takes q `[batch, queries, heads, head_dim]`, k and v `[batch, keys, heads, head_dim]` and returns out
`[batch, queries, heads, head_dim]` in q's dtype and LSE `[batch, heads, queries]` in fp32.
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
    HALVES,
    SAGE_ATTENTION,
    TRIAL,
    WORKS,
    AttentionKernel,
    Package,
    fault_of,
    package_faults,
)


@dataclass(frozen=True)
class Choice:
    """What a plan may ask for.

    Attributes:
        packages: the first of these that works is taken; if none does, one of torch's own kernels.
        insists: takes no other kernel.
    """

    packages: tuple[Package, ...]
    insists: bool = False


CHOICES: Mapping[str, Choice] = MappingProxyType(
    {
        "auto": Choice((FLASH_ATTN_3, FLASH_ATTN)),
        "sdpa": Choice(()),
        "flash": Choice((FLASH_ATTN_3, FLASH_ATTN), insists=True),
        "sage": Choice((SAGE_ATTENTION,), insists=True),
    }
)
"""By the name that the plan has for it."""

FLASH_HEAD_DIM = 256
"""The widest head that torch's own flash attention takes."""

FLASH_CAPABILITY = (8, 0)
"""The oldest GPUs that it runs on (Ampere)."""

CUDNN_CAPABILITIES = ((9, 0), (10, 0), (10, 3))
"""GPUs on which cuDNN's attention is the fastest (Hopper and Blackwell for data centres: nearly twice flash-attn 2)."""

CUDNN_HEAD_DIM = 128
"""The widest head that cuDNN takes on all of them."""


@dataclass(frozen=True)
class Kernel:
    """A chosen kernel and why it was chosen, for the log."""

    name: str
    reason: str
    attend: AttentionKernel


def choose_kernel(
    choice: str, device: torch.device, dtype: torch.dtype, head_dim: int, faults: Mapping[str, str] = WORKS
) -> Kernel:
    """The kernel for a device and dtype.

    Args:
        faults: what `package_faults` found on the device.

    Raises:
        Refused: the kernel asked for cannot run here; the sentence says why and what can.
    """
    if choice not in CHOICES:
        raise PlanRefused(f"attention {choice!r} is unknown: use one of {', '.join(CHOICES)}.")
    asked = CHOICES[choice]
    broken = []
    if not asked.insists and _cudnn_fits(device, dtype, head_dim):
        fault = cudnn_fault(device)
        if not fault:
            return Kernel("cudnn", "cuDNN is the fastest on this GPU", _sdpa_cudnn)
        broken.append(fault)
    reason = "asked for"
    for package in asked.packages:
        obstacle = package.obstacle(device, dtype, head_dim)
        reason = faults.get(package.name) or obstacle or ""
        if not reason:
            why = "approximate" if package.approximate else "; ".join(broken) or "installed"
            return Kernel(package.name, why, package.attend)
        broken += [faults[package.name]] if package.name in faults else []
    reason = "; ".join(broken) or reason
    if asked.insists:
        raise PlanRefused(f"attention {choice} cannot be used: {reason}; use auto or sdpa.")
    return Kernel("sdpa", reason, _sdpa(device, dtype, head_dim))


def is_approximate(choice: str) -> bool:
    """Whether a choice changes the picture slightly."""
    return choice in CHOICES and any(package.approximate for package in CHOICES[choice].packages)


def describe(plan: ResolvedPlan) -> str:
    """Short text for logs: the plan's own, with what is approximate about its attention."""
    return plan.describe(approximate_attention=is_approximate(plan.attention))


@functools.cache
def kernel_refusals(device: torch.device) -> Mapping[str, str]:
    """What can be asked for and does not run on this worker's device, each with the sentence that says why."""
    refused = {}
    for choice in (name for name, asked in CHOICES.items() if asked.insists):
        try:
            choose_kernel(choice, device, HALVES[0], TRIAL[-1], package_faults(device))
        except PlanRefused as refusal:
            refused[choice] = str(refusal)
    return refused


def warm_up_kernels(device: torch.device) -> None:
    """Try what may fail once, at a worker's start, so that no step waits for it."""
    package_faults(device)
    if _cudnn_fits(device, torch.bfloat16, CUDNN_HEAD_DIM):
        cudnn_fault(device)


@functools.cache
def cudnn_fault(device: torch.device) -> str:
    """How cuDNN's attention fails when it is called once on this worker's GPU; empty where it works."""
    return fault_of("cuDNN's attention", _sdpa_cudnn, device)


def _cudnn_fits(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether cuDNN's attention is made for these and is the fastest there."""
    if device.type != "cuda" or dtype not in HALVES or head_dim % 8 or head_dim > CUDNN_HEAD_DIM:
        return False
    return torch.cuda.get_device_capability(device) in CUDNN_CAPABILITIES


def _is_older(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) < FLASH_CAPABILITY


def _sdpa(device: torch.device, dtype: torch.dtype, head_dim: int) -> AttentionKernel:
    """torch's own kernel for a device: of those for GPUs flash attention, where it runs."""
    if device.type == "cpu":
        return _sdpa_cpu
    flash = dtype in HALVES and head_dim % 8 == 0 and head_dim <= FLASH_HEAD_DIM and not _is_older(device)
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
    if min(q.shape[1], k.shape[1]) < 2:  # which cuDNN does not take
        return _sdpa_flash(q, k, v)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)[:2]
    return out.transpose(1, 2), lse.reshape(q.shape[:3])


def _sdpa_efficient(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True)[:2]
    return out.transpose(1, 2), lse[..., : q.shape[2]]  # this kernel pads the LSE to a multiple of its block
