"""Attention kernels of packages that a user may have installed: flash-attn 2 and 3, and SageAttention.

Each takes q `[batch, queries, heads, head_dim]`, k and v `[batch, keys, heads, head_dim]` in fp16 or bf16 and returns out
`[batch, queries, heads, head_dim]` in q's dtype and LSE `[batch, heads, queries]` in fp32, as `kernels.py` asks.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

AttentionKernel = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(q, k, v) to (out, log-sum-exp), with the shapes above."""

HALVES = (torch.float16, torch.bfloat16)
"""What these kernels compute in."""

FAULT_LENGTH = 200
"""Characters of a library's error that a sentence can hold."""

TRIAL = (1, 128, 2, 64)
"""Shape of the operands of a kernel's first call."""

TRIAL_ERROR = 0.1
"""How far a kernel's first output and LSE may be from torch's (SageAttention's int8 and fp8 stay below; an LSE to another base,
or of scores that are not scaled, does not)."""


@dataclass(frozen=True)
class Package:
    """One of them.

    Args:
        module: what is imported.
        head_dim: of the widest heads that it takes.
        majors: CUDA compute capabilities that it runs on, before the dot.
        approximate: whether it changes the picture slightly.
    """

    name: str
    module: str
    head_dim: int
    majors: range
    attend: AttentionKernel
    approximate: bool = False

    def obstacle(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Why it cannot serve, or None if it can."""
        if device.type != "cuda":
            return f"{self.name} runs on GPUs only and this worker is on the {device.type}"
        if importlib.util.find_spec(self.module) is None:
            return f"{self.name} is not installed"
        if dtype not in HALVES:
            return f"{self.name} takes fp16 and bf16, not {str(dtype).removeprefix('torch.')}"
        if head_dim > self.head_dim:
            return f"{self.name} takes heads of up to {self.head_dim}, this model's have {head_dim}"
        major, minor = torch.cuda.get_device_capability(device)
        if major not in self.majors:
            gpu = torch.cuda.get_device_name(device)
            return f"{self.name} does not run on compute capability {major}.{minor}, which {gpu} has"
        return None

    def fault(self, device: torch.device) -> str:
        """How it fails when it is called once, or in what it differs from torch; empty where it works.

        A wheel may be built for another torch (it cannot be imported) or without kernels for this GPU (they do not start).
        """
        return fault_of(self.name, self.attend, device)


def fault_of(name: str, attend: AttentionKernel, device: torch.device) -> str:
    """How a kernel fails when it is called once, or in what it differs from torch; empty where it works."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(TRIAL, generator=generator).half().to(device) for _ in range(3))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) / TRIAL[-1] ** 0.5
    expected = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.float())
    try:
        out, lse = attend(q, k, v)
        errors = [float(_difference(out, expected)), float(_difference(lse, scores.logsumexp(-1)))]
    except Exception as error:
        said = (str(error).strip() or "no text").splitlines()[0]
        return f"{name} does not work on {device} ({type(error).__name__}: {said})"[:FAULT_LENGTH]
    if max(errors) < TRIAL_ERROR:
        return ""
    return f"{name} does not work on {device} (it differs from torch by {max(errors):.0%})"


def _difference(found: Tensor, expected: Tensor) -> Tensor:
    return (found.float() - expected).norm() / expected.norm()


def _flash_attn(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    from flash_attn import flash_attn_func

    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    return out, lse


def _flash_attn_3(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    from flash_attn_interface import flash_attn_func

    asked = {"return_attn_probs": True} if _gives_lse_if_asked(flash_attn_func) else {}
    out, lse = flash_attn_func(q, k, v, **asked)[:2]
    return out, lse


@functools.cache
def _gives_lse_if_asked(function: Callable[..., object]) -> bool:
    """Older ones of flash-attn 3 give the LSE always."""
    return "return_attn_probs" in inspect.signature(function).parameters


def _sage_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    from sageattention import sageattn

    out, lse = sageattn(q, k, v, tensor_layout="NHD", return_lse=True)
    return out, lse


FLASH_ATTN = Package("flash-attn", "flash_attn", 256, range(8, 100), _flash_attn)

FLASH_ATTN_3 = Package("flash-attn 3", "flash_attn_interface", 256, range(9, 10), _flash_attn_3)

SAGE_ATTENTION = Package("SageAttention", "sageattention", 128, range(8, 100), _sage_attention, approximate=True)
"""SageAttention, which multiplies in int8 and fp8."""

PACKAGES = FLASH_ATTN_3, FLASH_ATTN, SAGE_ATTENTION

WORKS: Mapping[str, str] = {}
"""Faults of packages, by name, where there are none."""


@functools.cache
def package_faults(device: torch.device) -> Mapping[str, str]:
    """How those that are installed and made for this worker's GPU fail on it, by name; each is called once."""
    fit = [package for package in PACKAGES if package.obstacle(device, HALVES[0], TRIAL[-1]) is None]
    return {package.name: fault for package in fit if (fault := package.fault(device))}
