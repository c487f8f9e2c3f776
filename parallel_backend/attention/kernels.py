"""Attention kernels that return the output and its log-sum-exp, and the choice among them.

Every kernel takes q `[batch, queries, heads, head_dim]`, k and v `[batch, keys, heads, head_dim]` and returns out
`[batch, queries, heads, head_dim]` in q's dtype and LSE `[batch, heads, queries]` in fp32.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import PlanRefused

Attend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

CHOICES = ("auto", "sdpa", "flash")
"""What a plan may ask for: torch's own kernels, the flash-attn package, or the best of them."""

FLASH_HEAD_DIM = 256
"""The widest head that flash attention takes."""

FAULT_LENGTH = 200
"""Characters of a library's error that a sentence can hold."""

FLASH_DTYPES = (torch.float16, torch.bfloat16)

FLASH_CAPABILITY = (8, 0)
"""The oldest GPUs that flash attention runs on, torch's own too (Ampere)."""

CUDNN_CAPABILITIES = ((9, 0), (10, 0), (10, 3))
"""GPUs on which cuDNN's attention is the fastest (Hopper and Blackwell for data centres: nearly twice flash-attn 2)."""

CUDNN_HEAD_DIM = 128
"""The widest head that cuDNN takes on all of them."""


@dataclass(frozen=True)
class Kernel:
    """A chosen kernel and why it was chosen, for the log."""

    name: str
    reason: str
    attend: Attend


def choose_kernel(choice: str, device: torch.device, dtype: torch.dtype, head_dim: int, fault: str = "") -> Kernel:
    """The kernel for a device and dtype.

    Args:
        fault: what `flash_fault` found on the device.

    Raises:
        Refused: the kernel asked for cannot run here; the sentence says why and what can.
    """
    if choice not in CHOICES:
        raise PlanRefused(f"attention {choice!r} is unknown: use one of {', '.join(CHOICES)}.")
    obstacle = fault or flash_obstacle(device, dtype, head_dim)
    if choice == "flash" and obstacle:
        raise PlanRefused(flash_refusal(obstacle))
    if choice != "flash" and _cudnn_serves(device, dtype, head_dim):
        return Kernel("cudnn", "cuDNN is the fastest on this GPU", _sdpa_cudnn)
    if choice != "sdpa" and not obstacle:
        return Kernel("flash", "flash-attn is installed", _flash_attn)
    reason = "asked for" if choice == "sdpa" else obstacle or ""
    return Kernel("sdpa", reason, _sdpa(device, dtype, head_dim))


def flash_obstacle(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the flash-attn package cannot serve, or None if it can."""
    if device.type != "cuda":
        return f"flash-attn runs on GPUs only and this worker is on the {device.type}"
    if importlib.util.find_spec("flash_attn") is None:
        return "flash-attn is not installed"
    if dtype not in FLASH_DTYPES:
        return f"flash-attn takes fp16 and bf16, not {str(dtype).removeprefix('torch.')}"
    if head_dim > FLASH_HEAD_DIM:
        return f"flash-attn takes heads of up to {FLASH_HEAD_DIM}, this model's have {head_dim}"
    if _is_older(device):
        return f"flash-attn needs a GPU of compute capability 8.0, and {torch.cuda.get_device_name(device)} is older"
    return None


def flash_refusal(obstacle: str) -> str:
    """The sentence for a plan that asks for flash-attn where it cannot serve."""
    return f"attention flash cannot be used: {obstacle}; use auto or sdpa."


@functools.cache
def flash_fault(device: torch.device) -> str:
    """How the installed flash-attn fails on this worker's GPU; empty where it works, is not installed, or has no GPU."""
    installed = device.type == "cuda" and importlib.util.find_spec("flash_attn") is not None
    return call_flash(device) if installed else ""


def call_flash(device: torch.device) -> str:
    """How flash-attn fails when it is called once; empty where it works.

    A wheel may be built for another torch (it cannot be imported) or without kernels for this GPU (they do not start).
    """
    return _fault("flash-attn", _flash_attn, device)


def warm_up_kernels(device: torch.device) -> None:
    """Try what may fail once, at a worker's start, so that no step waits for it."""
    flash_fault(device)
    _cudnn_serves(device, torch.bfloat16, CUDNN_HEAD_DIM)


@functools.cache
def cudnn_fault(device: torch.device) -> str:
    """How cuDNN's attention fails when it is called once on this worker's GPU; empty where it works."""
    return _fault("cuDNN's attention", _sdpa_cudnn, device)


def _fault(name: str, attend: Attend, device: torch.device) -> str:
    try:
        q = torch.zeros(1, 8, 1, 64, dtype=torch.float16, device=device)
        out, _ = attend(q, q, q)
        out.cpu()  # waits for it
    except Exception as error:
        said = (str(error).strip() or "no text").splitlines()[0]
        return f"{name} does not work on {device} ({type(error).__name__}: {said})"[:FAULT_LENGTH]
    return ""


def _cudnn_serves(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    fits = dtype in FLASH_DTYPES and head_dim % 8 == 0 and head_dim <= CUDNN_HEAD_DIM
    if device.type != "cuda" or not fits or torch.cuda.get_device_capability(device) not in CUDNN_CAPABILITIES:
        return False
    return not cudnn_fault(device)


def _is_older(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) < FLASH_CAPABILITY


def _flash_attn(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    from flash_attn import flash_attn_func

    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    return out, lse


def _sdpa(device: torch.device, dtype: torch.dtype, head_dim: int) -> Attend:
    """torch's own kernel for a device: of those for GPUs flash attention, where it runs."""
    if device.type == "cpu":
        return _sdpa_cpu
    flash = dtype in FLASH_DTYPES and head_dim % 8 == 0 and head_dim <= FLASH_HEAD_DIM and not _is_older(device)
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
