"""Attention packages that a user installs, with the kinds of wheels that users meet and the errors that these gave."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_backend.attention import kernels
from parallel_backend.attention.kernels import CHOICES, choose_kernel, describe, refused_kernels
from parallel_backend.attention.packages import (
    FLASH_ATTN,
    FLASH_ATTN_3,
    PACKAGES,
    SAGE_ATTENTION,
    kernel_failure,
    package_failures,
)
from parallel_backend.errors import Refused
from tests.support.plans import cpu_plan

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
SYMBOL = "flash_attn_2_cuda.cpython-311-x86_64-linux-gnu.so: undefined symbol: _ZN3c104cuda9SetDeviceEi"
NO_KERNEL = "CUDA error: no kernel image is available for execution on the device"
WHEELS = {
    "another torch": (f"raise ImportError({SYMBOL!r})", f"ImportError: {SYMBOL}"),
    "another GPU": (
        f"def flash_attn_func(*_, **__):\n    raise RuntimeError({NO_KERNEL!r} + '\\nFor debugging consider ...')",
        f"RuntimeError: {NO_KERNEL}",
    ),
    "no such function": ("", "ImportError: cannot import name 'flash_attn_func' from 'flash_attn'"),
}
COMPUTE = """
import torch

def attention(q, k, v):
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) / q.shape[-1] ** 0.5
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.float())
    return out.to(q.dtype), scores.logsumexp(-1)
"""
CASES = {
    "flash-attn": (
        FLASH_ATTN,
        "def flash_attn_func(q, k, v, return_attn_probs):\n    return *attention(q, k, v), None",
    ),
    "flash-attn 3": (FLASH_ATTN_3, "def flash_attn_func(q, k, v, softmax_scale=None):\n    return attention(q, k, v)"),
    "flash-attn 3 that gives the LSE if it is asked": (
        FLASH_ATTN_3,
        "def flash_attn_func(q, k, v, return_attn_probs=False):\n    return attention(q, k, v) if return_attn_probs else q",
    ),
    "SageAttention": (
        SAGE_ATTENTION,
        "def sageattn(q, k, v, tensor_layout='HND', return_lse=False):\n"
        "    assert tensor_layout == 'NHD' and return_lse\n    return attention(q, k, v)",
    ),
}
"""Functions of each package as they are called, computed by torch."""


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Provide a function that installs a package with this source."""

    def install(package, text: str) -> None:
        (tmp_path / f"{package.module}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)

    for package in PACKAGES:
        monkeypatch.delitem(sys.modules, package.module, raising=False)
    yield install
    for package in PACKAGES:
        sys.modules.pop(package.module, None)


@pytest.mark.parametrize(("text", "said"), WHEELS.values(), ids=WHEELS)
def test_a_failing_wheel_is_skipped_under_auto_and_refused_if_requested(wheel, text, said):
    wheel(FLASH_ATTN, text)
    fault = FLASH_ATTN.failure(CPU)
    assert fault.startswith(f"flash-attn does not work on cpu ({said}")
    assert "\n" not in fault
    kernel = choose_kernel("auto", CPU, torch.bfloat16, 64, {"flash-attn": fault})
    assert (kernel.name, kernel.reason) == ("sdpa", fault)
    with pytest.raises(Refused) as caught:
        choose_kernel("flash", CPU, torch.bfloat16, 64, {"flash-attn": fault})
    assert str(caught.value) == f"attention flash cannot be used: {fault}; use auto or sdpa."


@pytest.mark.parametrize(("package", "function"), CASES.values(), ids=CASES)
def test_a_working_wheel_has_no_failure_and_one_with_another_lse_has_one(wheel, package, function):
    wheel(package, COMPUTE + function)
    assert package.failure(CPU) == ""
    sys.modules.pop(package.module)
    wheel(package, COMPUTE.replace("logsumexp(-1)", "logsumexp(-1) / 0.6931") + function)
    assert package.failure(CPU) == f"{package.name} does not work on cpu (it differs from torch by 44%)"


def test_a_worker_without_a_gpu_calls_no_package(wheel):
    wheel(FLASH_ATTN, WHEELS["another torch"][0])
    assert package_failures(CPU) == {}
    assert refused_kernels(CPU) == {
        "flash": "attention flash cannot be used: flash-attn runs on GPUs only and this worker is on the cpu; use auto or sdpa.",
        "sage": "attention sage cannot be used: SageAttention runs on GPUs only and this worker is on the cpu; use auto or sdpa.",
    }
    with pytest.raises(Refused, match="flash-attn runs on GPUs only"):
        choose_kernel("flash", CPU, torch.bfloat16, 128)
    with pytest.raises(Refused, match="use one of auto, sdpa, flash"):
        choose_kernel("xformers", CPU, torch.bfloat16, 128)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """Provide a function that fakes a GPU with this compute capability, on which cuDNN works or fails with this message."""

    def made(capability: tuple[int, int], fault: str = "") -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(kernels, "cudnn_failure", lambda _: fault)

    return made


@pytest.mark.parametrize(
    ("choice", "capability", "dtype", "head_dim", "expected"),
    [
        ("auto", (9, 0), torch.bfloat16, 128, "cudnn"),
        ("auto", (10, 0), torch.float16, 64, "cudnn"),
        ("sdpa", (9, 0), torch.bfloat16, 72, "cudnn"),
        ("auto", (8, 9), torch.bfloat16, 128, "_sdpa_flash"),
        ("auto", (12, 0), torch.bfloat16, 128, "_sdpa_flash"),
        ("auto", (9, 0), torch.bfloat16, 136, "_sdpa_flash"),
        ("auto", (9, 0), torch.bfloat16, 70, "_sdpa_efficient"),
        ("auto", (9, 0), torch.float32, 128, "_sdpa_efficient"),
        ("auto", (7, 5), torch.float16, 128, "_sdpa_efficient"),
    ],
)
def test_cudnn_is_chosen_if_it_is_fastest_and_supports_the_heads(gpu, choice, capability, dtype, head_dim, expected):
    gpu(capability)
    kernel = choose_kernel(choice, GPU, dtype, head_dim)
    assert expected in (kernel.name, kernel.attend.__name__)
    assert (kernel.name == "cudnn") == (expected == "cudnn")


def test_failing_cudnn_is_named_and_skipped(gpu, wheel):
    fault = kernel_failure("cuDNN's attention", kernels._sdpa_cudnn, CPU)
    assert fault.startswith("cuDNN's attention does not work on cpu (NotImplementedError: Could not run")
    gpu((9, 0), fault)
    for choice in ("auto", "sdpa"):
        kernel = choose_kernel(choice, GPU, torch.bfloat16, 128)
        assert (kernel.name, kernel.reason) == ("sdpa", fault)
        assert kernel.attend is kernels._sdpa_flash
    wheel(FLASH_ATTN, "")
    kernel = choose_kernel("auto", GPU, torch.bfloat16, 128)
    assert (kernel.name, kernel.reason) == ("flash-attn", fault)
    both = choose_kernel("auto", GPU, torch.bfloat16, 128, {"flash-attn": "flash-attn does not work either"})
    assert (both.name, both.reason) == ("sdpa", f"{fault}; flash-attn does not work either")
    with pytest.raises(Refused, match="SageAttention is not installed"):
        choose_kernel("sage", GPU, torch.bfloat16, 128)


@pytest.mark.parametrize(("queries", "keys", "expected"), [(2, 2, "cudnn"), (1, 2, "flash"), (2, 1, "flash")])
def test_shapes_that_cudnn_does_not_support_run_in_flash_attention(queries, keys, expected):
    class Called(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    called: list[str] = []
    with FakeTensorMode():
        q, k = (torch.empty(1, tokens, 2, 64, device=GPU, dtype=torch.bfloat16) for tokens in (queries, keys))
        with Called():
            out, lse = kernels._sdpa_cudnn(q, k, k)
        assert (out.shape, lse.shape) == (q.shape, (1, 2, queries))
    assert f"aten::_scaled_dot_product_{expected}_attention" in called


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_installed_wheel_is_chosen_if_and_only_if_it_works():
    flash_attn = pytest.importorskip("flash_attn", exc_type=ImportError)
    q, k, v = torch.randn(3, 1, 8, 2, 64, device=GPU, dtype=torch.bfloat16)
    try:
        flash_attn.flash_attn_func(q, k, v)
        torch.cuda.synchronize(GPU)
        works = True
    except RuntimeError:
        works = False
    kernel = choose_kernel("auto", GPU, torch.bfloat16, 64, package_failures(GPU))
    assert kernel.name.startswith("flash-attn") == (
        works and choose_kernel("sdpa", GPU, torch.bfloat16, 64).name != "cudnn"
    )


def test_a_plans_description_marks_approximate_attention() -> None:
    plans = {choice: msgspec.structs.replace(cpu_plan(weights="sharded"), attention=choice) for choice in CHOICES}
    said = {choice: describe(plan) for choice, plan in plans.items() if "(approximate)" in describe(plan)}
    assert said == {"sage": "1 worker (cpu), attention sage (approximate), weights sharded"}
