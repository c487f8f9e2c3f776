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
    Guider,
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


CASES = [
    ("schnell", "euler", ODD, 1.0, 2),
    ("schnell", "heun", ODD, 2.0, 1),
    ("dev", "dpmpp_2m_sde", ODD, 1.0, 1),
    # The quick run compares the engine with the oracle under the samplers above. Sizes without a remainder hide no fault.
    *(
        pytest.param(*case, marks=thorough)
        for case in (
            ("schnell", "euler", EVEN, 2.0, 1),
            ("dev", "dpm_2", EVEN, 1.0, 1),
            ("dev", "euler_ancestral", ODD, 2.0, 1),
            ("schnell", "dpmpp_2m", EVEN, 1.0, 1),
            ("schnell", "uni_pc", EVEN, 1.0, 1),
        )
    ),
]


@pytest.mark.parametrize(("kind", "sampler", "size", "cfg", "batch"), CASES)
def test_the_oracle_equals_ksampler_without_stale_patches(
    kind: str, sampler: str, size: tuple[int, int], cfg: float, batch: int, request: pytest.FixtureRequest
) -> None:
    case: Case = request.getfixturevalue(kind)
    settings: dict[str, Any] = {"sampler": sampler, "size": size, "cfg": cfg, "batch": batch}
    expected = case.ksampler(**settings)
    for patches, warmup_steps in [(4, STEPS), (1, 1)]:
        result = process_out(case.simulate(**settings, patches=patches, warmup_steps=warmup_steps))
        assert distance(result, expected) <= 1e-6


def test_the_oracle_equals_ksampler_with_references_without_stale_patches(dev: Case) -> None:
    settings: dict[str, Any] = {"sampler": "euler", "size": ODD, "cfg": 2.0, "batch": 2, "references": REFERENCES}
    expected = dev.ksampler(**settings)
    for patches, warmup_steps in [(4, STEPS), (1, 1)]:
        result = process_out(dev.simulate(**settings, patches=patches, warmup_steps=warmup_steps))
        assert distance(result, expected) <= 1e-6
    assert distance(dev.ksampler(**settings | {"references": ()}), expected) > 1e-2


@pytest.mark.parametrize("sampler", ["euler", pytest.param("heun", marks=thorough)])
@pytest.mark.parametrize("size", [pytest.param(EVEN, marks=thorough), ODD])
def test_stale_patches_change_the_result_less_with_more_warm_up(
    schnell: Case, sampler: str, size: tuple[int, int]
) -> None:
    settings: dict[str, Any] = {"sampler": sampler, "size": size, "cfg": 2.0}
    exact = schnell.simulate(**settings, patches=1, warmup_steps=1)
    distances = [
        distance(schnell.simulate(**settings, patches=2, warmup_steps=warmup_steps), exact) for warmup_steps in (1, 4)
    ]
    assert distances[0] > distances[1] > 1e-4


@pytest.mark.parametrize("size", [pytest.param(EVEN, marks=thorough), ODD])
@pytest.mark.parametrize("mutation", ["updates_cache", "own_keys_fresh", "text_once"])
def test_other_rules_give_another_result(schnell: Case, mutation: str, size: tuple[int, int]) -> None:
    settings: dict[str, Any] = {"sampler": "euler", "size": size, "cfg": 2.0, "patches": 4, "warmup_steps": 1}
    mutant = schnell.simulate(**settings, rule=Rule(**{mutation: False}))
    assert distance(mutant, schnell.simulate(**settings)) > 1e-4  # the engine is compared at 1e-5


def test_the_result_depends_on_the_number_of_patches(schnell: Case) -> None:
    two, four = (
        schnell.simulate(sampler="euler", size=EVEN, cfg=1.0, patches=patches, warmup_steps=1) for patches in (2, 4)
    )
    assert distance(two, four) > 1e-4


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


def test_a_stale_call_at_the_same_latent_and_sigma_is_exact(schnell: Case) -> None:
    """At the same sigma and latent as the warm-up, the stale keys are right, so the second call is exact."""
    sigmas = torch.tensor([0.8, 0.8, 0.0])  # a step of no length keeps the latent
    settings: dict[str, Any] = {
        "model": schnell.model,
        "noise": draw(1, CHANNELS, *EVEN, seed=SEED),
        "sigmas": sigmas,
        "positive": POSITIVE,
        "sampler": "euler",
        "warmup_steps": 1,
    }
    assert distance(simulate({}, **settings, patches=4), simulate({}, **settings, patches=1)) <= 1e-6


@pytest.mark.parametrize(
    ("sampler", "steps_of_calls"),
    [("euler", [0, 1, 2, 3, 4]), ("heun", [0, 0, 1, 1, 2, 2, 3, 3, 4]), ("dpm_2", [0, 0, 1, 1, 2, 2, 3, 3, 4])],
)
def test_calls_are_assigned_to_steps(
    schnell: Case, sampler: str, steps_of_calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    guiders = []
    init = Guider.__init__

    def recorded(self: Guider, *args: Any) -> None:
        init(self, *args)
        guiders.append(self)

    monkeypatch.setattr(Guider, "__init__", recorded)
    schnell.simulate(sampler=sampler, size=EVEN, cfg=1.0, patches=2, warmup_steps=1)
    assert guiders[0].calls == steps_of_calls


def test_patches_are_runs_of_rows() -> None:
    assert patch_rows(9, 4) == [range(2), range(2, 4), range(4, 6), range(6, 9)]


def test_impossible_simulations_are_refused(schnell: Case) -> None:
    with pytest.raises(ValueError, match="warmup_steps"):
        schnell.simulate(sampler="euler", size=EVEN, cfg=1.0, patches=2, warmup_steps=0)
    with pytest.raises(ValueError, match="which step"):
        schnell.simulate(sampler="dpm_fast", size=EVEN, cfg=1.0, patches=2, warmup_steps=1)
    with pytest.raises(ValueError, match="cannot be cut"):
        schnell.simulate(sampler="euler", size=(6, 8), cfg=1.0, patches=4, warmup_steps=1)
