"""A flash-attn that does not work: wheels of the kinds that users meet, with the errors that theirs gave."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from parallel_backend.attention.kernels import call_flash, choose_kernel, flash_fault
from parallel_backend.errors import Refused

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
WORKING = "def flash_attn_func(q, k, v, return_attn_probs):\n    return q, q[..., 0], None"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Installs a flash_attn of this text."""

    def install(text: str) -> None:
        (tmp_path / "flash_attn.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)

    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    yield install
    sys.modules.pop("flash_attn", None)


@pytest.mark.parametrize(("text", "said"), WHEELS.values(), ids=WHEELS)
def test_a_wheel_that_fails_is_passed_over_under_auto_and_refused_where_asked_for(wheel, text, said):
    wheel(text)
    fault = call_flash(CPU)
    assert fault.startswith(f"flash-attn does not work on cpu ({said}")
    assert "\n" not in fault
    kernel = choose_kernel("auto", CPU, torch.bfloat16, 64, fault)
    assert (kernel.name, kernel.reason) == ("sdpa", fault)
    with pytest.raises(Refused) as caught:
        choose_kernel("flash", CPU, torch.bfloat16, 64, fault)
    assert str(caught.value) == f"attention flash cannot be used: {fault}; use auto or sdpa."


def test_a_wheel_that_works_has_no_fault(wheel):
    wheel(WORKING)
    assert call_flash(CPU) == ""


def test_a_worker_without_a_gpu_calls_no_flash_attn(wheel):
    wheel(WHEELS["another torch"][0])
    assert flash_fault(CPU) == ""


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
    kernel = choose_kernel("auto", GPU, torch.bfloat16, 64, flash_fault(GPU))
    assert (kernel.name == "flash") == (works and choose_kernel("sdpa", GPU, torch.bfloat16, 64).name != "cudnn")
