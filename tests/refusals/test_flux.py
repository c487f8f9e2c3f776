"""Inputs that a parallel MODEL does not support are refused by name, in one sentence that ends with a remedy; none is ignored."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import save_file

from scripts.comfyui import REPO, ComfyUI
from tests.refusals.of_flux import (
    CONDITIONINGS,
    FILES,
    LATENTS,
    LORAS,
    MODEL_NODES,
    PERTURBED,
    PLANS,
    SEEDS,
    WAY_OUT,
    assert_one_sentence,
    from_file,
    on_one_worker,
    small,
)
from tests.support.graphs.flux import (
    Graph,
    controlled,
    insert_after,
    insert_after_model,
    node,
    parallel,
    queue_logged,
    step_by_step,
)
from tests.support.latents import relative_error, saved_latent
from tests.support.selection import thorough
from tests.support.tiny.controlnet import save_xlabs
from tests.support.tiny.formats import save_diffusers


@pytest.fixture(scope="module")
def assert_still_right(comfyui: ComfyUI) -> Callable[[], None]:
    """Provide a function that asserts that an ordinary prompt gives the right latent."""
    graph, turns = small(), itertools.count(1)
    expected = saved_latent(comfyui, comfyui.queue(graph).check())

    def check() -> None:
        # Without PipeFusion the number has no effect; a new one keeps ComfyUI from reusing the result of the run before.
        run = comfyui.queue(parallel(graph, warmup_steps=next(turns)), timeout=300).check()
        assert relative_error(saved_latent(comfyui, run), expected) <= 1e-5

    return check


@pytest.fixture(scope="module")
def refusing() -> set[str]:
    """Provide the set of names of tests in which a refusal has already occurred."""
    return set()


@pytest.fixture
def refusal(
    request: pytest.FixtureRequest, comfyui: ComfyUI, assert_still_right: Callable[[], None], refusing: set[str]
) -> Callable[[Graph], str]:
    """Provide a function that queues a graph which is refused before a worker starts, and returns the sentence.

    The next prompt must still work. The quick run checks this once for each test, not for each case.
    """
    test = request.node.originalname

    def message(graph: Graph) -> str:
        run, log = queue_logged(comfyui, graph)
        assert run.status == "error"
        assert run.error is not None
        assert_one_sentence(run.error.exception_message)
        assert "Parallel: starting" not in log
        if request.config.getoption("all") or test not in refusing:
            assert_still_right()
        refusing.add(test)
        return run.error.exception_message

    return message


# -- nodes that change the inside of the model


@pytest.mark.parametrize(("kind", "inputs", "what"), MODEL_NODES.values(), ids=MODEL_NODES)
def test_a_node_that_changes_the_model_is_refused_by_name(refusal, lora, kind, inputs, what):
    message = refusal(insert_after_model(on_one_worker(small()), kind, **inputs))
    assert message.startswith(f"{what} cannot be ")
    assert message.endswith(WAY_OUT)


@pytest.mark.parametrize("sampler", [False, True], ids=["KSampler", "ParallelSampler"])
def test_guidance_that_replaces_attention_within_a_step_is_refused(comfyui, assert_still_right, sampler):
    graph = insert_after_model(parallel(small(), sampler=sampler), "PerturbedAttentionGuidance", **PERTURBED)
    run = comfyui.queue(graph, timeout=300)
    assert run.status == "error"
    message = run.error.exception_message
    assert_one_sentence(message)
    if sampler:
        assert message.startswith("Parallel Sampler does not support the model option sampler_")
    else:
        assert message.startswith("replaced attention or blocks (")
        assert message.endswith(WAY_OUT)
    assert_still_right()


@pytest.fixture(scope="session")
def lora(comfyui: ComfyUI) -> str:
    """Save a LoRA of rank 2 for one layer of tiny-schnell, and provide its file name."""
    layer = "diffusion_model.single_blocks.0.linear2"
    tensors = {f"{layer}.lora_down.weight": torch.ones(2, 5 * 512), f"{layer}.lora_up.weight": torch.ones(512, 2)}
    save_file(tensors, comfyui.base_dir / "models" / "loras" / "tiny-lora.safetensors")
    return "tiny-lora.safetensors"


def test_lora_hooks_on_conditioning_are_refused(refusal, lora):
    graph = on_one_worker(small()) | {
        "hook": node("CreateHookLora", lora_name=lora, strength_model=1.0, strength_clip=1.0)
    }
    hooked = {"strength": 1.0, "set_cond_area": "default", "hooks": ["hook", 0]}
    graph = insert_after(graph, "positive", "ConditioningSetProperties", "cond_NEW", **hooked)
    assert refusal(graph) == f"Applying LoRA hooks cannot be done with a parallel MODEL: {WAY_OUT}"


@pytest.mark.parametrize(("shapes", "expected"), LORAS.values(), ids=LORAS)
def test_a_lora_that_cannot_be_applied_is_refused_by_name(comfyui, refusal, shapes, expected):
    tensors = {name: torch.ones(shape) for name, shape in shapes.items()}
    name = f"wrong-{next(SEEDS)}.safetensors"  # the stock node caches the last file that it read
    save_file(tensors, comfyui.base_dir / "models" / "loras" / name)
    graph = insert_after_model(on_one_worker(small()), "LoraLoaderModelOnly", lora_name=name, strength_model=1.0)
    assert refusal(graph) == expected


@pytest.mark.parametrize("side", ["model1", "model2"])
@pytest.mark.parametrize("kind", ["ModelMergeSimple", "ModelMergeSubtract", "ModelMergeAdd"])
def test_merging_is_refused_on_either_side(refusal, kind, side):
    other = {"model1": "model2", "model2": "model1"}[side]
    ratio = {"ModelMergeSimple": {"ratio": 0.5}, "ModelMergeSubtract": {"multiplier": 1.0}}.get(kind, {})
    graph = insert_after(on_one_worker(small()), "model", kind, side, **{other: ["stock", 0]}, **ratio)
    graph["stock"] = node("UNETLoader", unet_name="tiny-dev.safetensors", weight_dtype="default")
    assert refusal(graph) == f"Merging models cannot be done with a parallel MODEL: {WAY_OUT}"


@pytest.mark.parametrize(
    ("kind", "inputs", "what"),
    [
        ("ModelSave", {"filename_prefix": "saved"}, "Saving the model"),
        (
            "LoraSave",
            {"filename_prefix": "saved", "rank": 2, "lora_type": "standard", "bias_diff": False},
            "Reading the weights",
        ),
    ],
    ids=["ModelSave", "LoraSave"],
)
def test_saving_weights_is_refused_and_writes_nothing(comfyui, refusal, kind, inputs, what):
    graph = on_one_worker(small())
    link = {"model_diff" if kind == "LoraSave" else "model": ["model", 0]}
    graph = {name: graph[name] for name in ("model", "plan")} | {"saver": node(kind, **link, **inputs)}
    assert refusal(graph) == f"{what} cannot be done with a parallel MODEL: {WAY_OUT}"
    assert not list(comfyui.output_dir.rglob("saved*"))


def test_a_controlnet_of_another_model_is_refused(comfyui, refusal, assert_still_right):
    assert_still_right()  # starts the workers: a ControlNet's output is known only in the middle of a denoise
    folder = comfyui.base_dir / "models" / "controlnet"
    save_xlabs(folder / "narrow-controlnet.safetensors", heads=1)
    graph = parallel(small()) | {
        "net": node("ControlNetLoader", control_net_name="narrow-controlnet.safetensors"),
        "image": node("EmptyImage", width=64, height=64, batch_size=1, color=0),
    }
    control = controlled(graph)
    assert refusal(control) == (
        "the ControlNet gives tensors of [2, 16, 128] and this job takes [2, 16, 512]: use a ControlNet that was made for "
        "this model."
    )
    control["sampler"]["class_type"] = "ParallelSampler"
    assert refusal(control) == (
        "Parallel Sampler does not support ControlNet: choose a graph without it, or KSampler, which is slower (one model "
        "call at a time)."
    )


@pytest.mark.parametrize("way", [dict, step_by_step], ids=["in the loop", "step by step"])
def test_a_reference_picture_of_another_vae_is_refused(refusal, way):
    graph = way(on_one_worker(small()))
    graph = insert_after(graph, "positive", "ReferenceLatent", "conditioning", latent=["latent", 0])
    assert refusal(graph) == (
        "a reference latent has the shape [1, 4, 8, 8] and FluxSchnell takes 16 channels: encode the reference picture with "
        "the VAE that belongs to this model."
    )


def test_parallel_sampler_refuses_a_stock_model(refusal):
    graph = small()
    graph["sampler"]["class_type"] = "ParallelSampler"
    assert refusal(graph) == (
        "Parallel Sampler takes a MODEL from a Load Parallel node: use such a loader, or the stock KSampler here."
    )


IN_PROCESS = """
import importlib.util, json, sys, types
import torch, comfy.cli_args
comfy.cli_args.args.cpu = True
import comfy.sample, nodes
root, file = sys.argv[1:]
spec = importlib.util.spec_from_file_location("pack", root + "/__init__.py", submodule_search_locations=[root])
sys.modules["pack"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["pack"])
from pack.nodes.model.build import load_model
from pack.nodes.model.refusals import refuse_transformer_options
from pack.parallel_backend.errors import Refused
from pack.parallel_backend.host import Backend
from pack.parallel_backend.plan import ParallelPlan

model = load_model(Backend(), "comfyui", file, "default", ParallelPlan(devices="cpu:2"))

stepwise = model.clone()
stepwise.add_wrapper("predict_noise", lambda executor, *given: executor(*given))

def denoise(model, **given):
    prompt = [[torch.zeros(1, 5, 64), {"pooled_output": torch.zeros(1, 32), **given}]]
    latent = torch.zeros(1, 16, 8, 8)
    comfy.sample.sample(model, latent, 2, 1.0, "euler", "simple", prompt, prompt, latent)

def redux(strength):
    style = types.SimpleNamespace(get_cond=lambda _: torch.zeros(1, 4, 64))
    text = [[torch.zeros(1, 5, 64), {}]]
    return nodes.StyleModelApply().apply_stylemodel(text, style, None, strength, "attn_bias")[0][0][1]

def refuse_options(options):
    refuse_transformer_options(options, model.model.diffusion_model.skeleton)

mask = "attention_mask in the conditioning"
actions = {
    "MultiGPU CFG Split": lambda: model.deepclone_multigpu(new_load_device=torch.device("meta")),
    "Wrapping weights": lambda: model.add_weight_wrapper("diffusion_model.img_in.weight", lambda weight: weight),
    "Replacing diffusion_model.img_in": lambda: model.add_object_patch("diffusion_model.img_in", torch.nn.Identity()),
    "an attention override": lambda: refuse_options({"optimized_attention_override": lambda *_: None}),
    "changed positions that are not numbers": lambda: refuse_options({"rope_options": {"scale_x": torch.ones(2)}}),
    mask: lambda: denoise(model, **redux(0.5)),
    f"{mask} (step by step)": lambda: denoise(stepwise, **redux(0.0)),
    f"{mask} (Parallel Sampler)": lambda: denoise(model.strict(), **redux(0.5)),
}
said = {}
for name, action in actions.items():
    try:
        action()
    except Refused as refused:
        said[name] = str(refused)
json.dump(said, sys.stdout)
"""


@pytest.fixture(scope="module")
def said_in_process(comfyui: ComfyUI) -> dict[str, str]:
    """Provide the refusals that no stock node causes here, without GPUs and Redux' encoder, from a separate process."""
    file = comfyui.base_dir / "models" / "diffusion_models" / "tiny-schnell.safetensors"
    environment = {**os.environ, "PYTHONPATH": str(comfyui.comfyui)}
    command = [sys.executable, "-c", IN_PROCESS, str(REPO), str(file)]
    done = subprocess.run(command, env=environment, cwd=comfyui.base_dir, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@thorough  # a separate process, which takes as long as 20 other tests
@pytest.mark.parametrize(
    "what",
    [
        "MultiGPU CFG Split",
        "Wrapping weights",
        "Replacing diffusion_model.img_in",
        "an attention override",
        "changed positions that are not numbers",
        "attention_mask in the conditioning",
        "attention_mask in the conditioning (step by step)",
        "attention_mask in the conditioning (Parallel Sampler)",
    ],
)
def test_actions_that_need_gpus_other_packs_or_large_files_are_refused(said_in_process, what):
    assert_one_sentence(said_in_process[what])
    begins = re.escape(what.partition(" (")[0])
    assert re.match(rf"{begins}( \([^)]+\))? cannot be ", said_in_process[what])


# -- files


@pytest.mark.parametrize(("content", "expected"), FILES.values(), ids=FILES)
def test_a_file_that_cannot_work_is_refused_with_the_reason(comfyui, refusal, content, expected):
    (comfyui.base_dir / "models" / "diffusion_models" / "wrong.safetensors").write_bytes(content)
    message = refusal(on_one_worker(small("wrong")))
    assert message.startswith("wrong.safetensors ")
    assert expected in message


def test_an_index_that_names_a_missing_file_is_refused(comfyui, refusal):
    folder = comfyui.base_dir / "models" / "diffusion_models" / "incomplete"
    first, *_ = sorted(
        save_diffusers(folder, folder.with_suffix(".safetensors"), heads=1, shard="2MB").glob("*.safetensors")
    )
    first.unlink()
    graph = on_one_worker(small())
    graph["model"]["inputs"]["unet_name"] = "incomplete"
    assert refusal(graph) == f"incomplete lacks the file {first.name} that its index names: download it into {folder}."


def test_a_file_that_is_missing_is_rejected_before_anything_runs(comfyui):
    run = comfyui.queue(on_one_worker(small("nowhere")))
    assert run.status == "rejected"
    assert "nowhere.safetensors" in run.error.exception_message


# -- plans


@pytest.mark.parametrize(("plan", "expected"), PLANS.values(), ids=PLANS)
def test_a_plan_that_cannot_work_is_refused_with_a_plan_that_does(refusal, plan, expected):
    assert refusal(parallel(small(), **plan)) == expected


def test_cfg_2_is_refused_without_a_negative_branch(refusal):
    assert refusal(parallel(small(cfg=1.0), "cpu:2", cfg=2)) == (
        "cfg 2 needs a negative prompt, and this sampling has none for this model (at cfg 1, or with BasicGuider, it is "
        "unused): set cfg to 0 or 1 in the plan, or the sampler's cfg above 1."
    )


@pytest.mark.parametrize("degree", ["data", "cfg", "pipefusion", "ulysses", "ring", "patches", "warmup_steps"])
def test_a_negative_degree_is_rejected_before_anything_runs(comfyui, degree):
    run = comfyui.queue(parallel(small(), "cpu:1", **{degree: -1}))
    assert run.status == "rejected"
    assert degree in run.error.exception_message


# -- latents and conditioning


@pytest.mark.parametrize(("tensor", "expected"), LATENTS.values(), ids=LATENTS)
def test_a_latent_that_cannot_work_is_refused_with_its_numbers(comfyui, refusal, tensor, expected):
    assert refusal(from_file(comfyui, tensor)) == expected


@pytest.mark.parametrize("way", [dict, step_by_step], ids=["in the loop", "step by step"])
@pytest.mark.parametrize(("write", "expected"), CONDITIONINGS.values(), ids=CONDITIONINGS)
def test_a_conditioning_that_cannot_work_is_refused_with_its_numbers(comfyui, refusal, write, expected, way):
    write(comfyui.input_dir / "wrong.safetensors")
    assert refusal(way(on_one_worker(small(positive="wrong")))) == expected
