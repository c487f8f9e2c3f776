"""ComfyUI's own nodes on a MODEL of Load Parallel FLUX give the same latent, in the expected loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import requests

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
from tests.support.latents import relative_error, saved_latent
from tests.support.selection import product, thorough
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


def custom(guider: str = "CFGGuider", select: dict[str, Any] | None = None, **guider_inputs: Any) -> Graph:
    """Return a graph of SamplerCustomAdvanced with a guider and a sampler node."""
    graph = basic()
    prompts = {
        "BasicGuider": {"conditioning": ["positive", 0]},
        "CFGGuider": {"positive": ["positive", 0], "negative": ["negative", 0], "cfg": 2.0},
    }
    guider_inputs = prompts.get(guider, {}) | guider_inputs
    return graph | {
        "noise": node("RandomNoise", noise_seed=SEED),
        "guider": node(guider, model=["model", 0], **guider_inputs),
        "select": select or node("KSamplerSelect", sampler_name="euler"),
        "sigmas": node("BasicScheduler", model=["model", 0], scheduler="simple", steps=STEPS, denoise=1.0),
        "sampler": node(
            "SamplerCustomAdvanced",
            noise=["noise", 0],
            guider=["guider", 0],
            sampler=["select", 0],
            sigmas=["sigmas", 0],
            latent_image=["latent", 0],
        ),
    }


def with_sigmas(graph: Graph, link: list[Any], **nodes: dict[str, Any]) -> Graph:
    """Replace the sigmas in the graph of `custom`."""
    graph = copy.deepcopy(graph) | nodes
    graph["sampler"]["inputs"]["sigmas"] = link
    return graph


def split(output: int, step: int = 2) -> Graph:
    """Return a graph that runs one output of SplitSigmas."""
    return with_sigmas(custom(), ["split", output], split=node("SplitSigmas", sigmas=["sigmas", 0], step=step))


def two_custom() -> Graph:
    """Return a graph of two samplers: the noisy sigmas, then the other sigmas on the result, without new noise."""
    graph = split(0)
    first = graph["first"] = graph.pop("sampler")
    graph["no-noise"] = node("DisableNoise")
    rest = {"noise": ["no-noise", 0], "sigmas": ["split", 1], "latent_image": ["first", 0]}
    graph["sampler"] = node("SamplerCustomAdvanced", **first["inputs"] | rest)
    return graph


def denoised_output() -> Graph:
    """Return a graph whose result is SamplerCustomAdvanced's prediction of the picture halfway."""
    graph = split(0)
    graph["save"]["inputs"]["samples"] = ["sampler", 1]
    return graph


def sampler_custom() -> Graph:
    graph = custom()
    inputs = {"model": ["model", 0], "add_noise": True, "noise_seed": SEED, "cfg": 2.0}
    links = {name: [name, 0] for name in ("positive", "negative", "sigmas")}
    graph["sampler"] = node("SamplerCustom", **inputs, **links, sampler=["select", 0], latent_image=["latent", 0])
    return graph


def combined(graph: Graph, kind: str = "ConditioningCombine", first: str = "positive", **inputs: Any) -> Graph:
    """Join a second prompt to the positive one by a node such as ConditioningCombine."""
    names = {
        "ConditioningCombine": ("conditioning_1", "conditioning_2"),
        "ConditioningSetDefaultCombine": ("cond", "cond_DEFAULT"),
    }
    into, other = names.get(kind, ("conditioning_to", "conditioning_from"))
    graph = insert_after(graph, first, kind, into, **{other: ["second", 0]}, **inputs)
    return graph | {"second": node("LoadConditioning", conditioning="cond-45.safetensors")}


def timestep_ranges(border: float = 0.5, model: str = NARROW, **settings: Any) -> Graph:
    """Return a graph with one prompt from the start to the border, and another from the border to the end."""
    graph = combined(basic(model, **settings))
    graph = insert_after(graph, "positive", "ConditioningSetTimestepRange", "conditioning", start=0.0, end=border)
    return insert_after(graph, "second", "ConditioningSetTimestepRange", "conditioning", start=border, end=1.0)


def late(border: float, model: str, **settings: Any) -> Graph:
    """Return a graph with no positive prompt before the border."""
    graph = basic(model, **settings)
    return insert_after(graph, "positive", "ConditioningSetTimestepRange", "conditioning", start=border, end=1.0)


def strengths() -> Graph:
    """Return a graph of two prompts, the first with a weight of 0.3."""
    return insert_after(combined(basic()), "positive", "ConditioningSetAreaStrength", "conditioning", strength=0.3)


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


def region() -> Graph:
    """Return a graph with a second prompt for the left half only."""
    area = {"width": 64, "height": 64, "x": 0, "y": 0, "strength": 1.0}  # ComfyUI accepts no smaller area
    return insert_after(combined(basic(width=128)), "second", "ConditioningSetArea", "conditioning", **area)


def prompt_mask() -> Graph:
    """Return a graph with a second prompt under a mask."""
    graph = combined(basic()) | {"mask": node("SolidMask", value=0.5, width=SIZE, height=SIZE)}
    settings = {"mask": ["mask", 0], "strength": 1.0, "set_cond_area": "default"}
    return insert_after(graph, "second", "ConditioningSetMask", "conditioning", **settings)


def dpmpp_2m_sde(noise_device: str) -> Graph:
    options = {"solver_type": "heun", "eta": 0.7, "s_noise": 0.9, "noise_device": noise_device}
    return custom(select=node("SamplerDPMPP_2M_SDE", **options))


SHIFT = {"max_shift": 1.3, "base_shift": 0.4, "width": 512, "height": 512}

LOOP: dict[str, Graph] = {
    "KSampler": basic(),
    "KSampler at cfg 1": basic(cfg=1.0),
    "KSampler from an image": second_run(),
    "KSamplerAdvanced": advanced(),
    "KSamplerAdvanced with leftover noise": advanced(end_at_step=2, return_with_leftover_noise="enable"),
    "KSamplerAdvanced that ends early": advanced(end_at_step=2),
    "KSamplerAdvanced that starts late": advanced(start_at_step=1),
    "KSamplerAdvanced without noise": advanced(start_at_step=1, add_noise="disable"),
    "KSamplerAdvanced, two in a row": two_advanced(),
    "SamplerCustom": sampler_custom(),
    "CFGGuider": custom(),
    "BasicGuider": custom("BasicGuider"),
    "SplitSigmas, the noisy half": split(0),
    "SplitSigmas, the other half": split(1),
    "SplitSigmas and DisableNoise, two in a row": two_custom(),
    "denoised_output": denoised_output(),
    "FlipSigmas": with_sigmas(split(1), ["flip", 0], flip=node("FlipSigmas", sigmas=["split", 1])),
    "ManualSigmas": with_sigmas(custom(), ["manual", 0], manual=node("ManualSigmas", sigmas="0.9, 0.6, 0.2, 0.1")),
    "SamplerEulerAncestral": custom(select=node("SamplerEulerAncestral", eta=0.5, s_noise=0.9)),
    "SamplerDPMPP_2M_SDE, noise from the CPU": dpmpp_2m_sde("cpu"),
    "SamplerDPMPP_2M_SDE, noise from the GPU": dpmpp_2m_sde("gpu"),
    "SamplerER_SDE": custom(
        select=node("SamplerER_SDE", solver_type="Reverse-time SDE", max_stage=2, eta=0.5, s_noise=0.9)
    ),
    "FluxGuidance": insert_after(basic(NARROW_DEV), "positive", "FluxGuidance", "conditioning", guidance=1.7),
    "FluxDisableGuidance": insert_after(basic(NARROW_DEV, cfg=1.0), "positive", "FluxDisableGuidance", "conditioning"),
    "ModelSamplingDiscrete": insert_after_model(basic(), "ModelSamplingDiscrete", sampling="v_prediction", zsnr=False),
    "ModelSamplingFlux": insert_after_model(basic(), "ModelSamplingFlux", **SHIFT),
    "ModelSamplingSD3": insert_after_model(basic(), "ModelSamplingSD3", shift=2.5),
    "ModelSamplingAuraFlow": insert_after_model(basic(), "ModelSamplingAuraFlow", shift=1.7),
    "ModelComputeDtype": insert_after_model(basic(), "ModelComputeDtype", dtype="fp32"),
    "ConditioningSetTimestepRange": timestep_ranges(),
    "ConditioningSetAreaStrength": strengths(),
    "ConditioningCombine": combined(basic()),
    "ConditioningCombine in the negative": combined(basic(), first="negative"),
    "ConditioningAverage": combined(basic(), "ConditioningAverage", conditioning_to_strength=0.4),
    "ConditioningConcat": combined(basic(), "ConditioningConcat"),
    "ConditioningZeroOut": insert_after(basic(), "negative", "ConditioningZeroOut", "conditioning"),
    "SetLatentNoiseMask on a batch": masked(),
    "MultiGPU CFG Split without a second GPU": insert_after_model(basic(), "MultiGPU_WorkUnits", max_gpus=2),
    "SelectModelDevice": insert_after_model(basic(), "SelectModelDevice", device="default"),
    "UNetSelfAttentionMultiply, which finds nothing": insert_after_model(
        basic(), "UNetSelfAttentionMultiply", q=1.2, k=1.1, v=0.9, out=0.8
    ),
    "CFGNorm, CFGZeroStar and Epsilon Scaling": insert_after_model(
        insert_after_model(insert_after_model(basic(), "CFGNorm", strength=0.9), "CFGZeroStar"),
        "Epsilon Scaling",
        scaling_factor=1.02,
    ),
}
"""Graphs that the workers' loop supports."""

QUICK_SPLIT = (
    "KSampler",
    "KSampler from an image",
    "SamplerDPMPP_2M_SDE, noise from the CPU",
    "FluxGuidance",
    "ConditioningSetTimestepRange",
    "SetLatentNoiseMask on a batch",
)
"""Names in LOOP that the quick run also splits. tests/engine proves that a node's path into the loop ignores the split."""

THOROUGH_LOOP = (
    "KSampler at cfg 1",
    "KSamplerAdvanced that ends early",
    "KSamplerAdvanced without noise",
    "SplitSigmas, the noisy half",
    "SplitSigmas, the other half",
    "SamplerDPMPP_2M_SDE, noise from the GPU",
    "ModelSamplingAuraFlow",
    "ModelComputeDtype",
    "ConditioningCombine in the negative",
    "MultiGPU CFG Split without a second GPU",
    "SelectModelDevice",
    "UNetSelfAttentionMultiply, which finds nothing",
)
"""Names in LOOP whose features the other graphs mostly cover too."""

STEP_BY_STEP: dict[str, tuple[Graph, str]] = {
    "ConditioningSetArea": (region(), "area in the conditioning"),
    "ConditioningSetMask": (prompt_mask(), "mask in the conditioning"),
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
    "DualCFGGuider": (
        combined(custom("BasicGuider"))
        | {
            "guider": node(
                "DualCFGGuider",
                model=["model", 0],
                cond1=["positive", 0],
                cond2=["second", 0],
                negative=["negative", 0],
                cfg_conds=2.0,
                cfg_cond2_negative=1.5,
                style="regular",
            )
        },
        "the guider Guider_DualCFG",
    ),
    "PerpNegGuider": (
        custom(
            "PerpNegGuider",
            positive=["positive", 0],
            negative=["negative", 0],
            empty_conditioning=["negative", 0],
            cfg=2.0,
            neg_scale=0.5,
        ),
        "the guider Guider_PerpNeg",
    ),
}


def case(name: str, graph: Graph, way: str) -> Any:
    marks = [thorough] * (name in THOROUGH_LOOP)
    return pytest.param(graph, [way] * (1 + ("first" in graph)), id=name, marks=marks)


def test_a_single_sigma_gives_the_workers_no_work(comfyui, latent_of):
    graph = split(1, step=STEPS)
    run, log = queue_logged(comfyui, parallel(graph))
    assert relative_error(saved_latent(comfyui, run.check()), latent_of(graph)) <= 1e-5
    assert ways(log) == []


@pytest.mark.parametrize(
    ("graph", "expected"),
    [case(name, graph, "loop") for name, graph in LOOP.items()]
    + [case(name, graph, reason) for name, (graph, reason) in (STEP_BY_STEP | CUSTOM_STEP_BY_STEP).items()],
)
def test_stock_nodes_give_the_same_latent_in_the_expected_loop(comfyui, latent_of, graph, expected):
    run, log = queue_logged(comfyui, parallel(graph))
    assert relative_error(saved_latent(comfyui, run.check()), latent_of(graph)) <= 1e-5
    assert ways(log) == expected


@pytest.mark.parametrize(
    "graph",
    [pytest.param(graph, id=name, marks=[thorough] * (name not in QUICK_SPLIT)) for name, graph in LOOP.items()],
)
def test_stock_nodes_give_the_same_latent_when_one_picture_is_divided(comfyui, latent_of, graph):
    run = comfyui.queue(parallel(graph, cfg=1, ulysses=2), timeout=300)
    assert relative_error(saved_latent(comfyui, run.check()), latent_of(graph)) <= 1e-5


@product(
    plan=[
        {"cfg": 2},
        {"cfg": 1, "ring": 2},
        {"cfg": 1, "ulysses": 2},
        {"data": 2},
        {"pipefusion": 2},
        {"weights": "sharded"},
    ],
    negative={"texts of one length": "cond-37-other", "of two": "cond-45"},
)
def test_every_plan_can_run_step_by_step(comfyui, latent_of, plan, negative):
    graph = step_by_step(basic(batch=2, negative=negative))
    run, log = queue_logged(comfyui, parallel(graph, **plan))
    assert relative_error(saved_latent(comfyui, run.check()), latent_of(graph)) <= 1e-5
    assert ways(log) == [UNKNOWN_WRAPPER]
    assert ("PipeFusion stages works at a time" in log) == ("pipefusion" in plan)


STAGES = {"cfg": 1, "pipefusion": 2, "patches": 2, "warmup_steps": STEPS}


@pytest.mark.parametrize(
    ("graph", "plan"),
    [
        (timestep_ranges(0.5, NARROW_DEV, steps=2), {"cfg": 1, "ulysses": 2}),
        pytest.param(timestep_ranges(0.25, NARROW_DEV), STAGES, marks=thorough),
        pytest.param(timestep_ranges(0.75, NARROW_DEV), {"cfg": 2}, marks=thorough),
        (timestep_ranges(0.6, steps=5), {"cfg": 2}),
        (late(0.5, NARROW_DEV, cfg=1.0), STAGES),
    ],
    ids=["2 steps, 0.5", "4 steps, 0.25", "4 steps, 0.75", "5 steps, 0.6", "4 steps, no prompt before 0.5"],
)
def test_timestep_ranges_that_end_on_a_steps_own_sigma_give_the_stock_latent(comfyui, latent_of, graph, plan):
    run, log = queue_logged(comfyui, parallel(graph, **plan))
    error = relative_error(saved_latent(comfyui, run.check()), latent_of(graph))
    print(f"off by {error:.1e}")
    assert error <= 1e-5
    assert ways(log) == ["loop"]


@thorough  # in the quick run test_quantised compiles blocks, with the same node, against the same oracle
def test_torch_compile_compiles_the_workers_blocks(comfyui, latent_of):
    """The backend cudagraphs runs the same graphs uncompiled on CPUs, which have no recorder. Inductor takes minutes.

    One worker is enough, since all workers compile the same blocks; tests/models (`test_compiled`) tests divided blocks.
    """
    graph = basic(seed=SEED + 4, steps=2)
    ours = insert_after_model(parallel(graph, "cpu:1"), "TorchCompileModel", backend="cudagraphs")
    run, log = queue_logged(comfyui, ours)
    assert relative_error(saved_latent(comfyui, run.check()), latent_of(graph)) <= 1e-5
    assert ways(log) == ["loop"]
    assert "blocks compiled by cudagraphs" in log
    assert "is not compiled" not in log


@pytest.mark.parametrize(("graph", "reason"), [pytest.param(*case, id=name) for name, case in STEP_BY_STEP.items()])
def test_parallel_sampler_refuses_graphs_that_would_run_step_by_step(comfyui, graph, reason):
    graph = parallel(graph, sampler=True)
    run, log = queue_logged(comfyui, graph)
    assert run.status == "error"
    assert run.error is not None
    message = run.error.exception_message
    assert message.startswith(f"Parallel Sampler does not support {reason}: choose ")
    assert message.endswith(", or KSampler, which is slower (one model call at a time).")
    assert len(ways(log)) == ("first" in graph), "only the KSampler before it has run"


@thorough
@pytest.mark.parametrize(
    "plan", [{"cfg": 1, "ulysses": 2}, {"cfg": 1, "pipefusion": 2}], ids=["ulysses 2", "pipefusion 2"]
)
def test_two_models_that_guide_a_picture_give_the_stock_latent(comfyui, latent_of, plan):
    """DualModelGuider runs another model for the negative prompt, also on workers."""
    sides = {side: [side, 0] for side in ("positive", "negative")}
    one = custom("BasicGuider") | {"guider": node("DualModelGuider", model=["model", 0], **sides, cfg=2.0)}
    graph = copy.deepcopy(one) | {"other": node("UNETLoader", unet_name="tiny-dev.safetensors", weight_dtype="default")}
    graph["guider"]["inputs"]["model_negative"] = ["other", 0]
    assert relative_error(latent_of(one), latent_of(graph)) > 1e-3
    ours = parallel(graph, **plan)
    ours["other"] = node("LoadParallelFlux", **graph["other"]["inputs"], plan=["plan", 0])
    assert requests.post(
        f"{comfyui.url}/parallel/stop", timeout=60
    ).ok  # also drops models that other tests have loaded
    run, log = queue_logged(comfyui, ours)
    assert relative_error(saved_latent(comfyui, run.check()), latent_of(graph)) <= 1e-5
    assert ways(log) == ["the guider Guider_DualModel"]
    assert log.count("Parallel: the workers loaded") == 2


@pytest.mark.parametrize("sampler", [False, True], ids=["KSampler", "ParallelSampler"])
@pytest.mark.parametrize("batch", [1, 2], ids=["one picture", "a batch"])
def test_every_step_shows_progress_and_a_preview(comfyui, sampler, batch):
    run = comfyui.queue(parallel(basic(seed=SEED + 3, steps=5, batch=batch), sampler=sampler), timeout=300).check()
    assert [(event.node, event.value, event.max) for event in run.progress] == [("sampler", k, 5) for k in range(1, 6)]
    assert run.previews == 5


def test_every_step_shows_progress_and_a_preview_when_it_runs_step_by_step(comfyui):
    graph = insert_after_model(basic(seed=SEED + 3), "Mahiro")
    run = comfyui.queue(parallel(graph), timeout=300).check()
    assert [event.value for event in run.progress] == [1, 2, 3, 4]
    assert run.previews == 4
