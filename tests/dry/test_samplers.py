"""No sampler waits for the device: each one of KSampler's list is replayed on a GPU that notes every wait."""

from __future__ import annotations

import pytest
import torch

from parallel_backend.denoise.noise import LatentNoise
from parallel_backend.denoise.patch_sampler import PatchSampler
from parallel_backend.denoise.replay import Prediction, script_of
from tests.dry.fake_gpu import DEVICE, FakeGpu
from tests.support.programs import encoded_program
from tests.support.sampler_names import LOCAL
from tests.support.selection import thorough

SHAPE = 1, 4, 6, 5
SIGMAS = torch.linspace(1, 0, 7)


@pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning", "ignore:To copy construct from:UserWarning")
# All samplers are replayed by the same operations. denoise/test_samplers replays every one.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[thorough] * (place % 4 > 0)) for place, name in enumerate(LOCAL)]
)
def test_no_step_of_a_sampler_waits(name: str) -> None:
    program = encoded_program(name, SIGMAS.clone(), torch.empty(SHAPE))
    with FakeGpu().running(0, 1) as gpu, torch.inference_mode():
        script = script_of(program, len(SHAPE), len(SIGMAS), DEVICE)
        x = torch.zeros(SHAPE, device=DEVICE)
        gpu.watch = True
        noise = LatentNoise(SHAPE, torch.device("cpu"), lambda _: x)  # stands for noise that another rank has drawn
        sampler, calls = PatchSampler(script, x, noise, None), 0
        while sampler.result is None:
            denoised, calls = sampler.model_input * 0.5, calls + 1
            sampler.advance(Prediction(denoised, (denoised, denoised)))
        assert calls == len(script.calls())
        assert gpu.begin().kernels.total() > calls
        assert not gpu.waits
