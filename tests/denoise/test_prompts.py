"""The prompts that take part in a step are those that ComfyUI chooses, also if a range ends on the step's own sigma."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallel_backend.denoise.prompts import Prompts
from parallel_backend.diffusion import PromptSpec
from tests.support.comfy_oracle import comfy_on_path

comfy_on_path()

import comfy.model_sampling  # noqa: E402
import comfy.samplers  # noqa: E402


class Schnell(comfy.model_sampling.ModelSamplingDiscreteFlow, comfy.model_sampling.CONST):
    """ComfyUI's noise process of FLUX.1 schnell, with its shift of 1."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(sampling_settings={"shift": 1.0, "multiplier": 1.0}))


class Dev(comfy.model_sampling.ModelSamplingFlux, comfy.model_sampling.CONST):
    """ComfyUI's noise process of FLUX.1 dev."""


def takes_part_in_comfyui(entry: dict[str, Any], sigma: torch.Tensor) -> bool:
    latent = torch.zeros(1, 1, 1, 1)
    return comfy.samplers.get_area_and_mult(entry, latent, sigma.expand(1)) is not None


@pytest.mark.parametrize("process", [Schnell, Dev])
def test_ranges_of_prompts_begin_and_end_as_in_comfyui(process: type[Any]) -> None:
    sampling, wrong = process(), []
    for steps in (2, 4, 5, 10):
        sigmas = comfy.samplers.calculate_sigmas(sampling, "simple", steps)
        for percent in {0.25, 0.5, 0.75, *(step / steps for step in range(steps + 1))}:
            for key in ("start_percent", "end_percent"):
                entries = [{key: percent, "model_conds": {}, "uuid": None}]
                comfy.samplers.calculate_start_end_timesteps(SimpleNamespace(model_sampling=sampling), entries)
                (entry,) = entries
                prompt = PromptSpec({}, start=entry.get("timestep_start"), end=entry.get("timestep_end"))
                prompts = Prompts({0: [prompt]}, [0], {}, torch.float32, 1, slice(0, 1))
                wrong += [
                    (steps, step, key, percent)
                    for step, sigma in enumerate(sigmas)
                    if bool(prompts.taking_part(sigma)) != takes_part_in_comfyui(entry, sigma)
                ]
    assert not wrong
