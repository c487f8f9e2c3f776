"""Wan's timestep embedding with cached numbers gives the bits of ComfyUI's own."""

from __future__ import annotations

import pytest
import torch

from parallel_backend.models.comfyui.timestep_numbers import NAME, TimestepNumbers

# isort: split
import comfy.ldm.wan.model as wan
import comfy.ldm.wan.model_animate as animate


@pytest.mark.parametrize("times", [torch.tensor([0.0, 1.0, 999.9]), torch.rand(7) * 1000, torch.tensor([3]).bfloat16()])
@pytest.mark.parametrize("width", [8, 256])
def test_the_timestep_embedding_equals_comfyuis(times: torch.Tensor, width: int) -> None:
    own = wan.sinusoidal_embedding_1d
    expected = own(width, times)
    numbers = TimestepNumbers(object.__new__(animate.AnimateWanModel))
    for _ in range(2):
        with numbers.in_use():
            for module in (wan, animate):
                assert getattr(module, NAME) is not own
                assert torch.equal(getattr(module, NAME)(width, times), expected)
    assert animate.sinusoidal_embedding_1d is wan.sinusoidal_embedding_1d is own
    assert torch.arange(3).dtype == torch.int64
