"""Host memory that is pinned for a GPU: once for weights that leave it again and again, and where the system forbids it."""

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
    """Keeps what it is asked to pin, and may refuse."""

    def __init__(self, error: int = 0) -> None:
        super().__init__()
        self.asked: list[int] = []
        self._error = error

    def register(self, address: int, nbytes: int, flags: int) -> int:
        """By CUDA's error."""
        self.asked.append(nbytes)
        return self._error or super().register(address, nbytes, flags)


def test_a_pin_that_fails_is_told_and_a_kernel_takes_the_error_that_it_has_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for error, kernels in ((0, 0), (2, 2)):  # one makes the value, one changes it
        gpu = Pinning(error)
        with gpu.running(0, 1):
            gpu.begin()
            pin(torch.empty(1024, dtype=torch.uint8))
        assert gpu.counts.kernels.total() == kernels
        assert bool(caplog.messages) == bool(error)
    assert NOT_PINNED in caplog.text


def test_host_memory_is_pinned_once_for_all_times_that_weights_leave() -> None:
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
