"""ComfyUI's own nodes on a MODEL of Load Parallel FLUX give the same latent, in the expected loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import requests

from tests.support.graphs.combined import (
    combined,
    ranged,
    with_area,
    with_guider,
    with_prompt_mask,
)
from tests.support.graphs.flux import (
    UNKNOWN_WRAPPER,
    Graph,
    insert_after,
    insert_after_model,
    ksampler_graph,
    node,
    parallel,
    queue_logged,
    step_by_step,
    ways,
)
from tests.support.latents import relative_error
from tests.support.selection import thorough
from tests.support.server import NARROW

SEED = 1100
STEPS = 4
SIZE = 64
"""Width and height in pixels; test_flux_parity has larger pictures."""


def basic(**settings: Any) -> Graph:
    size = {"width": SIZE, "height": SIZE}
    return ksampler_graph(NARROW, **size | {"seed": SEED, "steps": STEPS, "cfg": 2.0} | settings)


def two_advanced() -> Graph:
    """Return a graph of two KSamplerAdvanced: half of the steps with leftover noise, and the other half from there."""
    graph = basic()
    inputs = graph["sampler"]["inputs"]
    inputs["noise_seed"] = inputs.pop("seed")
    del inputs["denoise"]
    first = {"add_noise": "enable", "start_at_step": 0, "end_at_step": 2, "return_with_leftover_noise": "enable"}
    rest = {"add_noise": "disable", "start_at_step": 2, "end_at_step": 10000, "return_with_leftover_noise": "disable"}
    graph["first"] = node("KSamplerAdvanced", **inputs | first)
    graph["sampler"] = node("KSamplerAdvanced", **inputs | rest | {"latent_image": ["first", 0]})
    return graph


GUIDERS: dict[str, dict[str, Any]] = {
    "BasicGuider": {"conditioning": ["positive", 0]},
    "CFGGuider": {"positive": ["positive", 0], "negative": ["negative", 0], "cfg": 2.0},
}


def custom(guider: str = "CFGGuider", select: dict[str, Any] | None = None) -> Graph:
    """Return a graph of SamplerCustomAdvanced with a guider and a sampler node."""
    return with_guider(basic(), node(guider, model=["model", 0], **GUIDERS[guider]), select)


def split(output: int, step: int = 2, guider: str = "CFGGuider") -> Graph:
    """Return a graph that runs one output of SplitSigmas."""
    graph = custom(guider) | {"split": node("SplitSigmas", sigmas=["sigmas", 0], step=step)}
    graph["sampler"]["inputs"]["sigmas"] = ["split", output]
    return graph


def two_custom() -> Graph:
    """Return a graph of two samplers: the noisy sigmas, then the other sigmas on the result, without new noise."""
    graph = split(0)
    first = graph["first"] = graph.pop("sampler")
    graph["no-noise"] = node("DisableNoise")
    rest = {"noise": ["no-noise", 0], "sigmas": ["split", 1], "latent_image": ["first", 0]}
    graph["sampler"] = node("SamplerCustomAdvanced", **first["inputs"] | rest)
    return graph


def denoised_output() -> Graph:
    """Return a graph whose result is SamplerCustomAdvanced's prediction of the picture halfway, by BasicGuider."""
    graph = split(0, guider="BasicGuider")
    graph["save"]["inputs"]["samples"] = ["sampler", 1]
    return graph


def timestep_ranges() -> Graph:
    """Return a graph with one prompt for the first half of the run, and another for the second half."""
    return ranged(ranged(combined(basic()), "positive", 0.0, 0.5), "second", 0.5, 1.0)


def strengths() -> Graph:
    """Return a graph of two prompts, the first with a weight of 0.3, on a model of v-prediction."""
    graph = insert_after(combined(basic()), "positive", "ConditioningSetAreaStrength", "conditioning", strength=0.3)
    return insert_after_model(graph, "ModelSamplingDiscrete", sampling="v_prediction", zsnr=False)


def masked() -> Graph:
    """Return a graph that denoises only the right half of a batch of two, over the result of a first run."""
    graph = basic(batch=2)
    graph["first"] = copy.deepcopy(graph["sampler"])
    graph["sampler"]["inputs"]["latent_image"] = ["masked", 0]
    graph["sampler"]["inputs"]["seed"] = SEED + 1
    return graph | {
        "left": node("SolidMask", value=0.0, width=SIZE, height=SIZE),
        "right": node("SolidMask", value=1.0, width=SIZE // 2, height=SIZE),
        "mask": node("MaskComposite", destination=["left", 0], source=["right", 0], x=SIZE // 2, y=0, operation="add"),
        "masked": node("SetLatentNoiseMask", samples=["first", 0], mask=["mask", 0]),
    }


SDE = {"solver_type": "heun", "eta": 0.7, "s_noise": 0.9, "noise_device": "cpu"}

LOOP: dict[str, Graph] = {
    "KSamplerAdvanced, two in a row, with ConditioningAverage": combined(
        two_advanced(), "ConditioningAverage", conditioning_to_strength=0.4
    ),
    "SplitSigmas and DisableNoise, two in a row": two_custom(),
    "BasicGuider and denoised_output": denoised_output(),
    "SamplerDPMPP_2M_SDE": custom(select=node("SamplerDPMPP_2M_SDE", **SDE)),
    "ConditioningSetTimestepRange": timestep_ranges(),
    "ConditioningSetAreaStrength and ModelSamplingDiscrete": strengths(),
    "CFGNorm, CFGZeroStar and Epsilon Scaling": insert_after_model(
        insert_after_model(insert_after_model(basic(), "CFGNorm", strength=0.9), "CFGZeroStar"),
        "Epsilon Scaling",
        scaling_factor=1.02,
    ),
}
"""Graphs that the workers' loop supports."""

DIVIDED = ("SamplerDPMPP_2M_SDE", "ConditioningSetTimestepRange")
"""Names in LOOP whose picture is divided. The automatic plan of the others gives each branch a worker.

tests/engine proves that a node's path into the loop ignores the split. `test_every_node` has the other nodes.
"""

STEP_BY_STEP: dict[str, tuple[Graph, str]] = {
    "ConditioningSetArea": (with_area(basic(width=128)), "area in the conditioning"),
    "ConditioningSetMask": (with_prompt_mask(basic()), "mask in the conditioning"),
    "ConditioningSetDefaultCombine": (
        combined(basic(), "ConditioningSetDefaultCombine"),
        "default in the conditioning",
    ),
    "RescaleCFG": (
        insert_after_model(basic(), "RescaleCFG", multiplier=0.7),
        "the model option sampler_cfg_function",
    ),
    "Mahiro": (insert_after_model(basic(), "Mahiro"), "the model option sampler_post_cfg_function"),
    "CFGOverride": (
        insert_after_model(basic(), "CFGOverride", cfg=1.0, start_percent=0.4, end_percent=1.0),
        "the predict_noise wrapper unnamed",
    ),
    "DifferentialDiffusion": (
        insert_after_model(masked(), "DifferentialDiffusion", strength=1.0),
        "the model option denoise_mask_function",
    ),
    "ModelSamplingContinuousEDM": (
        insert_after_model(
            basic(), "ModelSamplingContinuousEDM", sampling="v_prediction", sigma_max=120.0, sigma_min=0.002
        ),
        "the model sampling ModelSamplingAdvanced",
    ),
}
"""Graphs that fall back to one forward for each model call, with KSampler, and the reason that the log gives."""

EQUAL = ("Mahiro", "DifferentialDiffusion", "ModelSamplingContinuousEDM")
"""Names in STEP_BY_STEP whose latents are compared here. test_keeping_step and test_guiders compare those of the others."""


def cases() -> list[Any]:
    """Return each graph, the way that each of its denoises takes, and its plan."""
    rows = [(name, graph, "loop", {"cfg": 1, "ulysses": 2} if name in DIVIDED else {}) for name, graph in LOOP.items()]
    rows += [(name, *STEP_BY_STEP[name], {}) for name in EQUAL]
    return [pytest.param(graph, [way] * (1 + ("first" in graph)), plan, id=name) for name, graph, way, plan in rows]


def test_a_single_sigma_gives_the_workers_no_work(assert_equal_latents):
    graph = split(1, step=STEPS)
    assert ways(assert_equal_latents(parallel(graph), graph)) == []


@pytest.mark.parametrize(("graph", "expected", "plan"), cases())
def test_stock_nodes_give_the_same_latent_in_the_expected_loop(assert_equal_latents, graph, expected, plan):
    assert ways(assert_equal_latents(parallel(graph, **plan), graph)) == expected


def test_pipefusion_can_run_step_by_step(assert_equal_latents):
    """Other tests have the other plans: test_keeping_step, test_controlnet_on_flux (a ring) and Mahiro (the automatic plan)."""
    graph = step_by_step(basic(batch=2))
    log = assert_equal_latents(parallel(graph, pipefusion=2), graph)
    assert ways(log) == [UNKNOWN_WRAPPER]
    assert "PipeFusion stages works at a time" in log


@pytest.mark.parametrize(("graph", "reason"), STEP_BY_STEP.values(), ids=STEP_BY_STEP)
def test_parallel_sampler_refuses_graphs_that_would_run_step_by_step(comfyui, graph, reason):
    run, log = queue_logged(comfyui, parallel(graph, sampler=True))
    assert run.error is not None
    message = run.error.exception_message
    assert message.startswith(f"Parallel Sampler does not support {reason}: choose ")
    assert message.endswith(", or KSampler, which is slower (one model call at a time).")
    assert len(ways(log)) == ("first" in graph), "only the KSampler before it has run"


@thorough
def test_two_models_that_guide_a_picture_give_the_stock_latent(comfyui, latent_of, assert_equal_latents):
    """DualModelGuider runs another model for the negative prompt, also on workers."""
    sides = {side: [side, 0] for side in ("positive", "negative")}
    one = custom("BasicGuider") | {"guider": node("DualModelGuider", model=["model", 0], **sides, cfg=2.0)}
    graph = copy.deepcopy(one) | {"other": node("UNETLoader", unet_name="tiny-dev.safetensors", weight_dtype="default")}
    graph["guider"]["inputs"]["model_negative"] = ["other", 0]
    assert relative_error(latent_of(one), latent_of(graph)) > 1e-3
    ours = parallel(graph, cfg=1, pipefusion=2)
    ours["other"] = node("LoadParallelFlux", **graph["other"]["inputs"], plan=["plan", 0])
    stopped = requests.post(f"{comfyui.url}/parallel/stop", timeout=60)
    assert stopped.ok, "the models that other tests have loaded are still there"
    log = assert_equal_latents(ours, graph)
    assert ways(log) == ["the guider Guider_DualModel"]
    assert log.count("Parallel: the workers loaded") == 2


@pytest.mark.parametrize(
    ("graph", "steps"),
    [
        pytest.param(parallel(basic(seed=SEED + 3, steps=5)), 5, id="KSampler"),
        pytest.param(parallel(basic(seed=SEED + 3, steps=5, batch=2), sampler=True), 5, id="ParallelSampler, a batch"),
        pytest.param(parallel(basic(seed=SEED + 3, steps=5, sampler="seeds_3")), 5, id="several calls a step"),
        pytest.param(parallel(insert_after_model(basic(seed=SEED + 3), "Mahiro")), STEPS, id="step by step"),
    ],
)
def test_every_step_shows_progress_and_a_preview(comfyui, graph, steps):
    run = comfyui.queue(graph, timeout=300).check()
    assert [(event.node, event.value, event.max) for event in run.progress] == [
        ("sampler", step, steps) for step in range(1, steps + 1)
    ]
    assert run.previews == steps
