"""The prompts of a model call, and their batches: ComfyUI's choice, also if a range ends on the step's own sigma."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallel_backend.denoise.prompts import Prompts
from parallel_backend.diffusion import PromptSpec
from tests.denoise.comparing import FluxSampling
from tests.support.programs import FlowSampling

import comfy.conds  # isort: skip
import comfy.samplers  # isort: skip


def takes_part_in_comfyui(entry: dict[str, Any], sigma: torch.Tensor) -> bool:
    latent = torch.zeros(1, 1, 1, 1)
    return comfy.samplers.get_area_and_mult(entry, latent, sigma.expand(1)) is not None


@pytest.mark.parametrize("process", [FlowSampling, FluxSampling])
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


def prompts_of(count: int, masks: tuple[torch.Tensor, ...] = ()) -> Prompts:
    """Return prompts of one branch, whose texts have equal shapes and the values 0, 1, ..."""
    tensors = {f"text {number}": torch.full((1, 2, 3), float(number)) for number in range(count)}
    tensors |= {f"mask {number}": mask for number, mask in enumerate(masks)}
    names = [
        {"context": f"text {number}"} | ({"attention_mask": f"mask {number}"} if masks else {})
        for number in range(count)
    ]
    return Prompts({0: [PromptSpec(each) for each in names]}, [0], tensors, torch.float32, 1, slice(0, 1))


def test_a_batch_has_the_prompts_in_comfyuis_order() -> None:
    texts: list[torch.Tensor] = []

    def apply_model(x: torch.Tensor, _: torch.Tensor, c_crossattn: torch.Tensor, **__: Any) -> torch.Tensor:
        texts.append(c_crossattn[:, 0, 0])
        return x

    patcher = SimpleNamespace(
        get_free_memory=lambda _: 1 << 40, prepare_state=lambda *_: None, apply_hooks=lambda hooks: {}
    )
    model = SimpleNamespace(current_patcher=patcher, apply_model=apply_model, memory_required=lambda *_, **__: 1)
    entries = [
        {
            "model_conds": {"c_crossattn": comfy.conds.CONDCrossAttn(torch.full((1, 2, 3), float(number)))},
            "uuid": number,
        }
        for number in range(3)
    ]
    latent = torch.zeros(1, 1, 1, 1)
    comfy.samplers.calc_cond_batch(model, [entries], latent, torch.ones(1), {})
    (batch,) = prompts_of(3).at(torch.tensor(1.0))
    (expected,) = texts
    assert torch.equal(batch.conditioning["context"][:, 0, 0], expected)
    assert batch.key == tuple(expected.int().tolist())


def test_prompts_share_a_batch_only_if_their_text_masks_are_equal() -> None:
    """A text mask drops tokens, so one mask stands for all rows of a batch."""
    hides, shows = torch.tensor([[1, 0]]), torch.tensor([[1, 1]])
    assert [batch.key for batch in prompts_of(3, (hides, shows, hides)).at(torch.tensor(1.0))] == [(2, 0), (1,)]
