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
    with_dual_cfg,
    with_guider,
    with_perp_neg,
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
from tests.support.server import NARROW, NARROW_DEV

SEED = 1100
STEPS = 4
SIZE = 64
"""Width and height in pixels; test_flux_parity has larger pictures."""


def basic(model: str = NARROW, **settings: Any) -> Graph:
    size = {"width": SIZE, "height": SIZE}
    return ksampler_graph(model, **size | {"seed": SEED, "steps": STEPS, "cfg": 2.0} | settings)


def advanced(**settings: Any) -> Graph:
    """Return a graph with KSamplerAdvanced instead of KSampler."""
    graph = basic()
    sampler = graph["sampler"]
    sampler["class_type"] = "KSamplerAdvanced"
    sampler["inputs"]["noise_seed"] = sampler["inputs"].pop("seed")
    del sampler["inputs"]["denoise"]
    whole = {"add_noise": "enable", "start_at_step": 0, "end_at_step": 10000, "return_with_leftover_noise": "disable"}
    sampler["inputs"] |= whole | settings
    return graph


def two_advanced() -> Graph:
    """Return a graph of two samplers: the first half of the steps with leftover noise, and the second half from there."""
    graph = advanced(end_at_step=2, return_with_leftover_noise="enable")
    first = graph["first"] = graph.pop("sampler")
    rest = {"latent_image": ["first", 0], "add_noise": "disable", "start_at_step": 2, "end_at_step": 10000}
    graph["sampler"] = node("KSamplerAdvanced", **first["inputs"] | rest | {"return_with_leftover_noise": "disable"})
    return graph


GUIDERS: dict[str, dict[str, Any]] = {
    "BasicGuider": {"conditioning": ["positive", 0]},
    "CFGGuider": {"positive": ["positive", 0], "negative": ["negative", 0], "cfg": 2.0},
}


def custom(guider: str = "CFGGuider", select: dict[str, Any] | None = None) -> Graph:
    """Return a graph of SamplerCustomAdvanced with a guider and a sampler node."""
    return with_guider(basic(), node(guider, model=["model", 0], **GUIDERS[guider]), select)


def with_sigmas(graph: Graph, link: list[Any], **nodes: dict[str, Any]) -> Graph:
    """Replace the sigmas in the graph of `custom`."""
    graph = copy.deepcopy(graph) | nodes
    graph["sampler"]["inputs"]["sigmas"] = link
    return graph


def split(output: int, step: int = 2, guider: str = "CFGGuider") -> Graph:
    """Return a graph that runs one output of SplitSigmas."""
    return with_sigmas(custom(guider), ["split", output], split=node("SplitSigmas", sigmas=["sigmas", 0], step=step))


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


def sampler_custom() -> Graph:
    graph = custom()
    inputs = {"model": ["model", 0], "add_noise": True, "noise_seed": SEED, "cfg": 2.0}
    links = {name: [name, 0] for name in ("positive", "negative", "sigmas")}
    graph["sampler"] = node("SamplerCustom", **inputs, **links, sampler=["select", 0], latent_image=["latent", 0])
    return graph


def timestep_ranges(border: float = 0.5, model: str = NARROW, **settings: Any) -> Graph:
    """Return a graph with one prompt from the start to the border, and another from the border to the end."""
    return ranged(ranged(combined(basic(model, **settings)), "positive", 0.0, border), "second", border, 1.0)


def strengths() -> Graph:
    """Return a graph of two prompts, the first with a weight of 0.3, on a model of v-prediction."""
    graph = insert_after(combined(basic()), "positive", "ConditioningSetAreaStrength", "conditioning", strength=0.3)
    return insert_after_model(graph, "ModelSamplingDiscrete", sampling="v_prediction", zsnr=False)


def masked(**settings: Any) -> Graph:
    """Return a graph that denoises only the right half of a batch of two, over the result of a first run."""
    graph = basic(batch=2, **settings)
    graph["first"] = copy.deepcopy(graph["sampler"])
    graph["sampler"]["inputs"]["latent_image"] = ["masked", 0]
    graph["sampler"]["inputs"]["seed"] = SEED + 1
    return graph | {
        "left": node("SolidMask", value=0.0, width=SIZE, height=SIZE),
        "right": node("SolidMask", value=1.0, width=SIZE // 2, height=SIZE),
        "mask": node("MaskComposite", destination=["left", 0], source=["right", 0], x=SIZE // 2, y=0, operation="add"),
        "masked": node("SetLatentNoiseMask", samples=["first", 0], mask=["mask", 0]),
    }


def second_run() -> Graph:
    """Return an image-to-image graph, which denoises the first result again by half."""
    graph = basic()
    graph["first"] = copy.deepcopy(graph["sampler"])
    graph["sampler"]["inputs"] |= {"latent_image": ["first", 0], "denoise": 0.5, "seed": SEED + 1}
    return graph


SHIFT = {"max_shift": 1.3, "base_shift": 0.4, "width": 512, "height": 512}

SDE = {"solver_type": "heun", "eta": 0.7, "s_noise": 0.9, "noise_device": "cpu"}
ER_SDE = {"solver_type": "Reverse-time SDE", "max_stage": 2, "eta": 0.5, "s_noise": 0.9}

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

DIVIDED_IN_QUICK_RUN = (
    "SamplerDPMPP_2M_SDE",
    "ConditioningSetTimestepRange",
)
"""Names in LOOP whose picture the quick run divides. The automatic plan of the others gives each branch a worker.

tests/engine proves that a node's path into the loop ignores the split.
"""

FURTHER_LOOP: dict[str, Graph] = {
    # in the quick run ConditioningSetTimestepRange, with KSampler
    "KSampler": basic(),
    # in the quick run SplitSigmas, with this guider
    "CFGGuider": custom(),
    # in the quick run BasicGuider and denoised_output
    "BasicGuider": custom("BasicGuider"),
    # in the quick run families/test_flux_and_wan has this node on Wan
    "ModelSamplingSD3": insert_after_model(basic(), "ModelSamplingSD3", shift=2.5),
    # in the quick run BasicGuider
    "KSampler at cfg 1": basic(cfg=1.0),
    # in the quick run test_flux_parity's latents with a picture
    "KSampler from an image": second_run(),
    # in the quick run KSamplerAdvanced, two in a row
    "KSamplerAdvanced that starts late": advanced(start_at_step=1),
    "KSamplerAdvanced that ends early": advanced(end_at_step=2),
    # in the quick run SplitSigmas, with CFGGuider, which this node makes itself
    "SamplerCustom": sampler_custom(),
    # in the quick run refusals/test_odd_inputs has rising sigmas
    "FlipSigmas": with_sigmas(split(1), ["flip", 0], flip=node("FlipSigmas", sigmas=["split", 1])),
    # in the quick run SplitSigmas, whose sigmas do not end at 0 either
    "ManualSigmas": with_sigmas(custom(), ["manual", 0], manual=node("ManualSigmas", sigmas="0.9, 0.6, 0.2, 0.1")),
    # in the quick run SamplerDPMPP_2M_SDE, with the same options
    "SamplerEulerAncestral": custom(select=node("SamplerEulerAncestral", eta=0.5, s_noise=0.9)),
    "SamplerER_SDE": custom(select=node("SamplerER_SDE", **ER_SDE)),
    # in the quick run families/test_flux_and_wan has ModelSamplingSD3, which sets a shift too
    "ModelSamplingFlux": insert_after_model(basic(), "ModelSamplingFlux", **SHIFT),
    # in the quick run families/test_flux_and_wan has ModelSamplingSD3, from which it derives
    "ModelSamplingAuraFlow": insert_after_model(basic(), "ModelSamplingAuraFlow", shift=1.7),
    # in the quick run ConditioningSetAreaStrength, with the same combined prompts
    "ConditioningCombine in the negative": combined(basic(), first="negative"),
    # in the quick run test_flux_parity has masks of a batch, and DifferentialDiffusion this graph
    "SetLatentNoiseMask on a batch": masked(),
    # in the quick run ConditioningAverage, which gives new tensors too
    "ConditioningConcat": combined(basic(), "ConditioningConcat"),
    "ConditioningZeroOut": insert_after(basic(), "negative", "ConditioningZeroOut", "conditioning"),
    # in the quick run other graphs of KSampler, whose MODEL these leave unchanged
    "MultiGPU CFG Split without a second GPU": insert_after_model(basic(), "MultiGPU_WorkUnits", max_gpus=2),
    "SelectModelDevice": insert_after_model(basic(), "SelectModelDevice", device="default"),
    "UNetSelfAttentionMultiply, which finds nothing": insert_after_model(
        basic(), "UNetSelfAttentionMultiply", q=1.2, k=1.1, v=0.9, out=0.8
    ),
}
"""Graphs of the workers' loop that are left to `--all`."""

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

CUSTOM_STEP_BY_STEP: dict[str, tuple[Graph, str]] = {
    "DualCFGGuider": (with_dual_cfg(basic()), "the guider Guider_DualCFG"),
    "PerpNegGuider": (with_perp_neg(basic()), "the guider Guider_PerpNeg"),
}

EQUAL_ELSEWHERE = (
    "ConditioningSetArea",
    "ConditioningSetMask",
    "ConditioningSetDefaultCombine",
    "RescaleCFG",
    "CFGOverride",
    "DualCFGGuider",
    "PerpNegGuider",
)
"""Names in STEP_BY_STEP whose latents the quick run compares in test_keeping_step and in test_guiders.

Here Parallel Sampler gives the reason. `test_guiders` has CFGOverride and the guiders.
"""

PLANS: dict[str, dict[str, int]] = {"automatic": {}, "divided": {"cfg": 1, "ulysses": 2}}


def cases() -> list[Any]:
    """Return each graph with the way that each of its denoises takes. Graphs of the loop run under both plans."""
    rows = [
        (name, graph, "loop", plan, name in FURTHER_LOOP or (plan == "divided") != (name in DIVIDED_IN_QUICK_RUN))
        for plan in PLANS
        for name, graph in (LOOP | FURTHER_LOOP).items()
    ]
    rows += [
        (name, *case, "automatic", name in EQUAL_ELSEWHERE)
        for name, case in (STEP_BY_STEP | CUSTOM_STEP_BY_STEP).items()
    ]
    return [
        pytest.param(
            graph, [way] * (1 + ("first" in graph)), PLANS[plan], id=f"{name}, {plan}", marks=[thorough] * late
        )
        for name, graph, way, plan, late in rows
    ]


def test_a_single_sigma_gives_the_workers_no_work(assert_equal_latents):
    graph = split(1, step=STEPS)
    assert ways(assert_equal_latents(parallel(graph), graph)) == []


@pytest.mark.parametrize(("graph", "expected", "plan"), cases())
def test_stock_nodes_give_the_same_latent_in_the_expected_loop(assert_equal_latents, graph, expected, plan):
    assert ways(assert_equal_latents(parallel(graph, **plan), graph)) == expected


STEPS_APART = {
    "cfg 2": ({"cfg": 2}, "cond-37-other"),
    "ring 2": ({"cfg": 1, "ring": 2}, "cond-45"),
    "ulysses 2": ({"cfg": 1, "ulysses": 2}, "cond-37-other"),
    "data 2": ({"data": 2}, "cond-45"),
    "pipefusion 2": ({"pipefusion": 2}, "cond-37-other"),
    "sharded": ({"weights": "sharded"}, "cond-45"),
}
"""Plans, each with a negative prompt of the positive prompt's length or of another."""


@pytest.mark.parametrize(
    ("plan", "negative"),
    [  # test_keeping_step has cfg 2, data 2 and sharded weights, test_controlnet_on_flux a ring, and Mahiro the automatic plan
        pytest.param(*case, id=name, marks=[thorough] * (name != "pipefusion 2")) for name, case in STEPS_APART.items()
    ],
)
def test_every_plan_can_run_step_by_step(assert_equal_latents, plan, negative):
    graph = step_by_step(basic(batch=2, negative=negative))
    log = assert_equal_latents(parallel(graph, **plan), graph)
    assert ways(log) == [UNKNOWN_WRAPPER]
    assert ("PipeFusion stages works at a time" in log) == ("pipefusion" in plan)


STAGES = {"cfg": 1, "pipefusion": 2, "patches": 2, "warmup_steps": STEPS}


@thorough  # in the quick run ConditioningSetTimestepRange, and denoise/test_prompts has the first and the last step of a range
@pytest.mark.parametrize(
    ("graph", "plan"),
    [
        (timestep_ranges(0.5, NARROW_DEV, steps=2), {"cfg": 1, "ulysses": 2}),
        (timestep_ranges(0.25, NARROW_DEV), STAGES),
        (timestep_ranges(0.75, NARROW_DEV), {"cfg": 2}),
        (timestep_ranges(0.6, steps=5), {"cfg": 2}),
        (ranged(basic(NARROW_DEV, cfg=1.0), "positive", 0.5, 1.0), STAGES),
    ],
    ids=["2 steps, 0.5", "4 steps, 0.25", "4 steps, 0.75", "5 steps, 0.6", "4 steps, no prompt before 0.5"],
)
def test_timestep_ranges_that_end_on_a_steps_own_sigma_give_the_stock_latent(assert_equal_latents, graph, plan):
    assert ways(assert_equal_latents(parallel(graph, **plan), graph)) == ["loop"]


def test_torch_compile_compiles_the_workers_blocks(assert_equal_latents):
    """The backend cudagraphs runs the same graphs uncompiled on CPUs, which have no recorder. Inductor takes minutes.

    One worker is enough, since all workers compile the same blocks; tests/models (`test_compiled`) tests divided blocks.
    """
    graph = basic(seed=SEED + 4, steps=2)
    ours = insert_after_model(parallel(graph, "cpu:1"), "TorchCompileModel", backend="cudagraphs")
    log = assert_equal_latents(ours, graph)
    assert ways(log) == ["loop"]
    assert "blocks compiled by cudagraphs" in log
    assert "is not compiled" not in log


@pytest.mark.parametrize(("graph", "reason"), STEP_BY_STEP.values(), ids=STEP_BY_STEP)
def test_parallel_sampler_refuses_graphs_that_would_run_step_by_step(comfyui, graph, reason):
    run, log = queue_logged(comfyui, parallel(graph, sampler=True))
    assert run.error is not None
    message = run.error.exception_message
    assert message.startswith(f"Parallel Sampler does not support {reason}: choose ")
    assert message.endswith(", or KSampler, which is slower (one model call at a time).")
    assert len(ways(log)) == ("first" in graph), "only the KSampler before it has run"


@thorough
@pytest.mark.parametrize(
    "plan", [{"cfg": 1, "ulysses": 2}, {"cfg": 1, "pipefusion": 2}], ids=["ulysses 2", "pipefusion 2"]
)
def test_two_models_that_guide_a_picture_give_the_stock_latent(comfyui, latent_of, assert_equal_latents, plan):
    """DualModelGuider runs another model for the negative prompt, also on workers."""
    sides = {side: [side, 0] for side in ("positive", "negative")}
    one = custom("BasicGuider") | {"guider": node("DualModelGuider", model=["model", 0], **sides, cfg=2.0)}
    graph = copy.deepcopy(one) | {"other": node("UNETLoader", unet_name="tiny-dev.safetensors", weight_dtype="default")}
    graph["guider"]["inputs"]["model_negative"] = ["other", 0]
    assert relative_error(latent_of(one), latent_of(graph)) > 1e-3
    ours = parallel(graph, **plan)
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
