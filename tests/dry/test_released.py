"""Weights that leave a GPU and come back, again and again: pinning the memory that they wait in takes longer than the copies."""

from __future__ import annotations

import torch
from torch import nn

from parallel_backend.weights.whole import Whole
from tests.comfy_oracle import comfy_on_path

comfy_on_path()

from tests.dry.fake_gpu import DEVICE, FakeGpu  # noqa: E402


def test_host_memory_is_pinned_once_for_all_times_that_weights_leave() -> None:
    pinned: list[int] = []

    class Counting(FakeGpu):
        def register(self, address: int, nbytes: int, flags: int) -> int:
            pinned.append(nbytes)
            return super().register(address, nbytes, flags)

    gpu = Counting()
    module = nn.Module()
    module.register_buffer("weight", torch.empty(64, 64, device="meta"))
    with gpu.running(0, 1):
        whole = Whole(module)
        whole.materialise(DEVICE)
        for _ in range(3):
            whole.leaving(True)
            whole.leave(True)
            assert module.weight.device.type == "cpu"
            whole.come_back()
            whole.stay()
            assert module.weight.device == DEVICE
    assert pinned == [64 * 64 * 4]
    assert whole.spare == 64 * 64 * 4
    whole.give_up()
    assert whole.spare == 0
