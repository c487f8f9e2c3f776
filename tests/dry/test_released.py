"""Host memory is pinned for a GPU once for weights that leave it repeatedly. A system that forbids pinning gives a warning."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parallel_backend.transfers import NOT_PINNED
from parallel_backend.weights.stores.host_copy import pin
from parallel_backend.weights.stores.replicated import ReplicatedStore
from tests.support.comfy_oracle import comfy_on_path

comfy_on_path()

from tests.dry.fake_gpu import DEVICE, FakeGpu  # noqa: E402


class Pinning(FakeGpu):
    """A GPU that keeps the sizes it is asked to pin, and can refuse with an error."""

    def __init__(self, error: int = 0) -> None:
        super().__init__()
        self.asked: list[int] = []
        self._error = error

    def register(self, address: int, nbytes: int, flags: int) -> int:
        """Note the size, and return CUDA's error."""
        self.asked.append(nbytes)
        return self._error or super().register(address, nbytes, flags)


def test_a_failed_pin_is_logged_and_its_pending_cuda_error_is_cleared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for error, kernels in ((0, 0), (2, 2)):  # one kernel makes the value, one changes it
        gpu = Pinning(error)
        with gpu.running(0, 1):
            gpu.begin()
            pin(torch.empty(1024, dtype=torch.uint8))
        assert gpu.counts.kernels.total() == kernels
        assert bool(caplog.messages) == bool(error)
    assert NOT_PINNED in caplog.text


def test_host_memory_is_pinned_once_for_weights_that_leave_repeatedly() -> None:
    gpu = Pinning()
    module = nn.Module()
    module.register_buffer("weight", torch.empty(64, 64, device="meta"))
    with gpu.running(0, 1):
        whole = ReplicatedStore(module)
        whole.materialise(DEVICE)
        for _ in range(3):
            whole.leaving(True)
            whole.leave(True)
            assert module.weight.device.type == "cpu"
            whole.come_back()
            whole.stay()
            assert module.weight.device == DEVICE
    assert gpu.asked == [64 * 64 * 4]
    assert whole.idle == 64 * 64 * 4
    whole.give_up()
    assert whole.idle == 0
