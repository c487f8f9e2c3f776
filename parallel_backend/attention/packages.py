"""Attention kernels of packages that a user may have installed: flash-attn 2 and 3, and SageAttention.

Each kernel takes q `[batch, queries, heads, head_dim]`, k and v `[batch, keys, heads, head_dim]` in fp16 or bf16. It returns
the output `[batch, queries, heads, head_dim]` in q's dtype and the log-sum-exp `[batch, heads, queries]` in fp32.
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

HALF_DTYPES = (torch.float16, torch.bfloat16)
"""The dtypes that these kernels take."""

MAX_FAILURE_LENGTH = 200
"""The largest number of characters in the sentence about a failure, which quotes a library's error."""

TRIAL_SHAPE = (1, 128, 2, 64)
"""Shape of q, k and v in the trial call of a kernel."""

MAX_TRIAL_ERROR = 0.1
"""Allowed relative error of the trial call. SageAttention's int8 and fp8 stay below it. A log-sum-exp to another base, or of
scores without scale, does not."""


@dataclass(frozen=True)
class KernelPackage:
    """A package with an attention kernel.

    Attributes:
        name: the package's name in messages.
        module: the name of the Python module.
        max_head_dim: the largest head_dim that the kernel takes.
        majors: the major CUDA compute capabilities that the kernel runs on.
        attend: the kernel.
        approximate: True if the kernel changes the picture slightly.
    """

    name: str
    module: str
    max_head_dim: int
    majors: range
    attend: AttentionKernel
    approximate: bool = False

    def unsupported_reason(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Return why the kernel cannot run for this device, dtype and head_dim; None if it can."""
        if device.type != "cuda":
            return f"{self.name} runs on GPUs only and this worker is on the {device.type}"
        if importlib.util.find_spec(self.module) is None:
            return f"{self.name} is not installed"
        if dtype not in HALF_DTYPES:
            return f"{self.name} supports fp16 and bf16, not {str(dtype).removeprefix('torch.')}"
        if head_dim > self.max_head_dim:
            return f"{self.name} supports a head_dim of up to {self.max_head_dim}, and this model has {head_dim}"
        major, minor = torch.cuda.get_device_capability(device)
        if major not in self.majors:
            gpu = torch.cuda.get_device_name(device)
            return f"{self.name} does not run on compute capability {major}.{minor}, which {gpu} has"
        return None

    def failure(self, device: torch.device) -> str:
        """Call the kernel once and return a sentence about its failure; empty if it works.

        The import fails if the wheel was built for another torch. The launch fails if the wheel has no kernels for this GPU.
        """
        return kernel_failure(self.name, self.attend, device)


def kernel_failure(name: str, attend: AttentionKernel, device: torch.device) -> str:
    """Call a kernel once and compare it with torch.

    Args:
        name: the kernel's name in the sentence.
        attend: the kernel.
        device: the device of the trial call.

    Returns:
        A sentence with the kernel's error or its difference from torch; empty if it works.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(TRIAL_SHAPE, generator=generator).half().to(device) for _ in range(3))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) / TRIAL_SHAPE[-1] ** 0.5
    expected = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.float())
    try:
        out, lse = attend(q, k, v)
        errors = [float(_relative_error(out, expected)), float(_relative_error(lse, scores.logsumexp(-1)))]
    except Exception as error:
        reason = (str(error).strip() or "no text").splitlines()[0]
        return f"{name} does not work on {device} ({type(error).__name__}: {reason})"[:MAX_FAILURE_LENGTH]
    if max(errors) < MAX_TRIAL_ERROR:
        return ""
    return f"{name} does not work on {device} (it differs from torch by {max(errors):.0%})"


def _relative_error(result: Tensor, expected: Tensor) -> Tensor:
    return (result.float() - expected).norm() / expected.norm()


def _flash_attn(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    from flash_attn import flash_attn_func

    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    return out, lse


def _flash_attn_3(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    from flash_attn_interface import flash_attn_func

    options = {"return_attn_probs": True} if _has_lse_option(flash_attn_func) else {}
    out, lse = flash_attn_func(q, k, v, **options)[:2]
    return out, lse


@functools.cache
def _has_lse_option(function: Callable[..., object]) -> bool:
    """Return True if the log-sum-exp is optional. Older versions of flash-attn 3 always return it."""
    return "return_attn_probs" in inspect.signature(function).parameters


def _sage_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    from sageattention import sageattn

    out, lse = sageattn(q, k, v, tensor_layout="NHD", return_lse=True)
    return out, lse


FLASH_ATTN = KernelPackage("flash-attn", "flash_attn", 256, range(8, 100), _flash_attn)

FLASH_ATTN_3 = KernelPackage("flash-attn 3", "flash_attn_interface", 256, range(9, 10), _flash_attn_3)

SAGE_ATTENTION = KernelPackage("SageAttention", "sageattention", 128, range(8, 100), _sage_attention, approximate=True)
"""The approximate kernel of SageAttention. It multiplies in int8 and fp8."""

PACKAGES = FLASH_ATTN_3, FLASH_ATTN, SAGE_ATTENTION

NO_FAILURES: Mapping[str, str] = {}
"""The failures of packages that all work."""


@functools.cache
def package_failures(device: torch.device) -> Mapping[str, str]:
    """Call each installed kernel once that supports this GPU, and return the failures by package name."""
    supported = [
        package for package in PACKAGES if package.unsupported_reason(device, HALF_DTYPES[0], TRIAL_SHAPE[-1]) is None
    ]
    return {package.name: failure for package in supported if (failure := package.failure(device))}
