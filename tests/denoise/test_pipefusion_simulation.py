"""The PipeFusion oracle itself: exact or stale where it must be, and able to tell wrong rules apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.pipefusion_simulation import (
    PIPEFUSION,
    Branch,
    Rule,
    ksampler_sigmas,
    load_model,
    patch_rows,
    process_out,
    simulate,
)
from tests.support.selection import thorough
from tests.support.tiny.flux import CHANNELS, POOLED_WIDTH, TEXT_WIDTH, flux_tensors

import comfy.latent_formats  # isort: skip
import comfy.samplers  # isort: skip
import comfy.sd  # isort: skip

pytestmark = [
    pytest.mark.filterwarnings("ignore:Should have t:UserWarning"),  # a warning of torchsde, for ComfyUI too
]

STEPS = 5
SEED = 7
EVEN, ODD = (16, 16), (17, 13)  # 8x8 and 9x7 tokens


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


POSITIVE = draw(1, 24, TEXT_WIDTH, seed=1), draw(1, POOLED_WIDTH, seed=2)
NEGATIVE = draw(1, 11, TEXT_WIDTH, seed=3), draw(1, POOLED_WIDTH, seed=4)
REFERENCES = draw(1, CHANNELS, 6, 10, seed=5), draw(1, CHANNELS, 7, 5, seed=6)


class Case:
    """A tiny model, loaded once for the simulation and once as ComfyUI loads it."""

    def __init__(self, *, guidance: bool) -> None:
        tensors = flux_tensors(heads=2, guidance=guidance)
        self.model = load_model(tensors)
        self.patcher = comfy.sd.load_diffusion_model_state_dict(dict(tensors))

    def simulate(self, *, sampler: str, size: tuple[int, int], cfg: float, batch: int = 1, **settings: Any) -> Tensor:
        return simulate(
            {},
            model=self.model,
            noise=draw(batch, CHANNELS, *size, seed=SEED),
            sigmas=ksampler_sigmas(self.model, STEPS, sampler=sampler),
            positive=POSITIVE,
            negative=NEGATIVE,
            cfg=cfg,
            sampler=sampler,
            seed=SEED,
            **settings,
        )

    def ksampler(
        self, *, sampler: str, size: tuple[int, int], cfg: float, batch: int = 1, references: Sequence[Tensor] = ()
    ) -> Tensor:
        noise = draw(batch, CHANNELS, *size, seed=SEED)
        given: dict[str, Any] = {}
        if references:
            latents = [comfy.latent_formats.Flux().process_out(latent) for latent in references]
            given = {"reference_latents": latents, "reference_latents_method": "index"}
        prompts = [[[context, {"pooled_output": pooled, **given}]] for context, pooled in (POSITIVE, NEGATIVE)]
        ksampler = comfy.samplers.KSampler(self.patcher, STEPS, torch.device("cpu"), sampler, "simple")
        with torch.no_grad():
            return ksampler.sample(
                noise, *prompts, cfg, latent_image=torch.zeros_like(noise), seed=SEED, disable_pbar=True
            )


@pytest.fixture(scope="module")
def schnell() -> Case:
    return Case(guidance=False)


@pytest.fixture(scope="module")
def dev() -> Case:
    return Case(guidance=True)


def distance(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize(
    ("kind", "sampler", "size", "cfg", "batch", "references"),
    [
        ("schnell", "euler", ODD, 1.0, 2, ()),
        ("schnell", "heun", ODD, 2.0, 1, ()),
        ("dev", "dpmpp_2m_sde", ODD, 1.0, 1, ()),
        ("dev", "euler", ODD, 2.0, 2, REFERENCES),
        # The quick run compares the engine with the oracle under the samplers above. Sizes without a remainder hide no fault.
        pytest.param("dev", "dpm_2", EVEN, 1.0, 1, (), marks=thorough),
        pytest.param("dev", "euler_ancestral", ODD, 2.0, 1, (), marks=thorough),
        pytest.param("schnell", "dpmpp_2m", EVEN, 1.0, 1, (), marks=thorough),
        pytest.param("schnell", "uni_pc", EVEN, 1.0, 1, (), marks=thorough),
    ],
)
def test_the_oracle_equals_ksampler_without_stale_patches(
    kind: str,
    sampler: str,
    size: tuple[int, int],
    cfg: float,
    batch: int,
    references: Sequence[Tensor],
    request: pytest.FixtureRequest,
) -> None:
    case: Case = request.getfixturevalue(kind)
    settings: dict[str, Any] = {"sampler": sampler, "size": size, "cfg": cfg, "batch": batch, "references": references}
    expected = case.ksampler(**settings)
    for patches, warmup_steps in [(4, STEPS), (1, 1)]:
        result = process_out(case.simulate(**settings, patches=patches, warmup_steps=warmup_steps))
        assert distance(result, expected) <= 1e-6
    assert not references or distance(case.ksampler(**settings | {"references": ()}), expected) > 1e-2


def test_other_rules_and_other_numbers_of_patches_give_another_result(schnell: Case) -> None:
    settings: dict[str, Any] = {"sampler": "euler", "size": ODD, "cfg": 1.0, "patches": 4, "warmup_steps": 1}
    expected = schnell.simulate(**settings)
    rules = [{"rule": Rule(**{mutation: False})} for mutation in ("updates_cache", "own_keys_fresh", "text_once")]
    for change in (*rules, {"patches": 2}, {"warmup_steps": 2}):
        assert distance(schnell.simulate(**settings | change), expected) > 1e-4  # the engine is compared at 1e-5


@pytest.mark.parametrize("changed", range(3))
def test_a_patch_sees_earlier_patches_of_this_call_and_later_ones_of_the_previous_call(
    schnell: Case, changed: int
) -> None:
    """A change of one patch's latent shows at once in that patch and later ones, and in all patches at the next call."""
    rows = [slice(2 * run.start, 2 * run.stop) for run in patch_rows(8, 3)]
    before, now = (draw(1, CHANNELS, *EVEN, seed=seed) for seed in (10, 11))
    other = now.clone()
    other[:, :, rows[changed]] = draw(1, CHANNELS, *EVEN, seed=12)[:, :, rows[changed]]

    results = []
    for x in (now, other):
        branch = Branch(schnell.model, POSITIVE, None, 3, PIPEFUSION)
        branch.denoised(before, torch.tensor([0.9]), whole=True)
        first = branch.denoised(x, torch.tensor([0.8]), whole=False)
        results.append((first, branch.denoised(before, torch.tensor([0.7]), whole=False)))
    for patch in range(3):
        first, second = ([result[call][:, :, rows[patch]] for result in results] for call in (0, 1))
        assert torch.equal(*first) == (patch < changed)
        assert not torch.equal(*second)  # the change is in the keys of the call before
