"""What a parallel MODEL cannot do is refused by name, in one sentence that ends with a way out; nothing is ignored."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file

from scripts.comfyui import REPO, ComfyUI
from tests.host.conftest import relative_error, saved_latent
from tests.host.graphs import (
    Graph,
    controlled,
    insert_after,
    insert_after_model,
    ksampler_graph,
    node,
    parallel,
    queue_logged,
    step_by_step,
)
from tests.selection import thorough
from tests.tiny_controlnet import save_xlabs
from tests.tiny_flux import CHANNELS, POOLED_WIDTH, TEXT_WIDTH, flux_tensors, save_conditioning
from tests.tiny_formats import save_diffusers

WAY_OUT = "the weights live in the workers; remove that node, or use Load Diffusion Model."
SEEDS = itertools.count(2200)


def small(model: str = "tiny-schnell", **settings: Any) -> Graph:
    """A job of a moment, with a seed of its own so that ComfyUI has no result of it."""
    return ksampler_graph(model, **{"width": 64, "height": 64, "steps": 2, "cfg": 2.0, "seed": next(SEEDS)} | settings)


def assert_one_sentence(message: str) -> None:
    assert message.endswith(".")
    assert "\n" not in message
    assert "Traceback" not in message
    assert not re.search(r"[.!?]\s", message), f"more than one sentence: {message}"


@pytest.fixture(scope="module")
def assert_still_right(comfyui: ComfyUI) -> Callable[[], None]:
    """Asserts that an ordinary prompt gives the right latent."""
    graph, turns = small(), itertools.count(1)
    expected = saved_latent(comfyui, comfyui.queue(graph).check())

    def check() -> None:
        # It makes no difference without PipeFusion, and keeps ComfyUI from taking the result of the run before.
        run = comfyui.queue(parallel(graph, warmup_steps=next(turns)), timeout=300).check()
        assert relative_error(saved_latent(comfyui, run), expected) <= 1e-5

    return check


@pytest.fixture(scope="module")
def refusing() -> set[str]:
    """The tests that have refused something."""
    return set()


@pytest.fixture
def refusal(
    request: pytest.FixtureRequest, comfyui: ComfyUI, assert_still_right: Callable[[], None], refusing: set[str]
) -> Callable[[Graph], str]:
    """Queues a graph that is refused before a worker starts; returns the sentence. The next prompt works as ever.

    The quick run looks at the next prompt once a test, not at each of its cases.
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


def on_one_worker(graph: Graph) -> Graph:
    """On another plan than that of the running workers: the log would show that they start."""
    return parallel(graph, "cpu:1")


# -- nodes that reach into the model

PATCHES = "attention and block patches ({})"
REPLACED = "replaced attention or blocks ({})"

MODEL_NODES: dict[str, tuple[str, dict[str, Any], str]] = {
    "HyperTile": (
        "HyperTile",
        {"tile_size": 256, "swap_size": 2, "max_depth": 0, "scale_depth": False},
        PATCHES.format("attn1_patch, attn1_output_patch"),
    ),
    "TomePatchModel": ("TomePatchModel", {"ratio": 0.3}, PATCHES.format("attn1_patch, attn1_output_patch")),
    "PatchModelAddDownscale": (
        "PatchModelAddDownscale",
        {
            "block_number": 3,
            "downscale_factor": 2.0,
            "start_percent": 0.0,
            "end_percent": 0.35,
            "downscale_after_skip": True,
            "downscale_method": "bicubic",
            "upscale_method": "bicubic",
        },
        PATCHES.format("input_block_patch_after_skip, output_block_patch"),
    ),
    "SelfAttentionGuidance": ("SelfAttentionGuidance", {"scale": 0.5, "blur_sigma": 2.0}, REPLACED.format("attn1")),
    "FluxKVCache": ("FluxKVCache", {}, "Replacing diffusion_model.params.default_ref_method"),
    "LoraLoaderBypassModelOnly": (
        "LoraLoaderBypassModelOnly",
        {"lora_name": "tiny-lora.safetensors", "strength_model": 1.0},
        "Applying a LoRA in bypass mode",
    ),
}


@pytest.mark.parametrize(("kind", "inputs", "what"), MODEL_NODES.values(), ids=MODEL_NODES)
def test_a_node_that_changes_the_model_is_refused_by_name(refusal, lora, kind, inputs, what):
    message = refusal(insert_after_model(on_one_worker(small()), kind, **inputs))
    assert message.startswith(f"{what} cannot be ")
    assert message.endswith(WAY_OUT)


PERTURBED = {"scale": 3.0}
"""PerturbedAttentionGuidance's inputs."""


@pytest.mark.parametrize("sampler", [False, True], ids=["KSampler", "ParallelSampler"])
def test_guidance_that_replaces_attention_in_the_middle_of_a_step_is_refused(comfyui, assert_still_right, sampler):
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
    """A LoRA of rank 2 for one layer of tiny-schnell."""
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


LAYER = "diffusion_model.single_blocks.0.linear2"
LORAS: dict[str, tuple[dict[str, tuple[int, ...]], str]] = {
    "a LoRA of another model": (
        {f"{LAYER}.lora_down.weight": (2, 64), f"{LAYER}.lora_up.weight": (96, 2)},
        "an adapter changes [96, 64] values of single_blocks.0.linear2.weight, which has [512, 2560]: choose a LoRA that "
        "was made for this model.",
    ),
    "factors that do not fit": (
        {f"{LAYER}.lora_down.weight": (2, 2560), f"{LAYER}.lora_up.weight": (512, 3)},
        "an adapter's factors of [512, 3] and [2, 2560] do not fit each other: choose another LoRA.",
    ),
    "OFT blocks that do not fit": (
        {f"{LAYER}.oft_blocks": (3, 32, 32)},
        "an adapter changes [96, 2560] values of single_blocks.0.linear2.weight, which has [512, 2560]: choose a LoRA "
        "that was made for this model.",
    ),
    "BOFT": (
        {f"{LAYER}.oft_blocks": (2, 16, 32, 32)},
        f"an adapter of the type boft cannot be applied to a parallel MODEL: {WAY_OUT}",
    ),
    "a LoRA that enlarges img_in": (
        {
            "img_in.lora_A.weight": (2, 128),
            "img_in.lora_B.weight": (512, 2),
            "single_blocks.0.norm.key_norm.scale": (128,),
        },
        "a LoRA that enlarges a weight (FLUX.1 Canny and Depth LoRAs do) cannot be applied to a parallel MODEL: "
        f"{WAY_OUT}",
    ),
    "Tucker": (
        {f"{LAYER}.hada_{part}": (2, 2) for part in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")},
        "a Tucker-decomposed adapter, which is made for convolutions, cannot be applied to a parallel MODEL: "
        f"{WAY_OUT}",
    ),
}


@pytest.mark.parametrize(("shapes", "expected"), LORAS.values(), ids=LORAS)
def test_a_lora_that_cannot_be_applied_is_refused_by_name(comfyui, refusal, shapes, expected):
    tensors = {name: torch.ones(shape) for name, shape in shapes.items()}
    name = f"wrong-{next(SEEDS)}.safetensors"  # the stock node keeps the last file it read
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
    assert_still_right()  # its workers run from here on: what a ControlNet gives is known in the middle of a denoise only
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
    "changed positions that are no numbers": lambda: refuse_options({"rope_options": {"scale_x": torch.ones(2)}}),
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
    """Refusals of what no stock node does here (without GPUs, without Redux' encoder), in a process of its own."""
    file = comfyui.base_dir / "models" / "diffusion_models" / "tiny-schnell.safetensors"
    environment = {**os.environ, "PYTHONPATH": str(comfyui.comfyui)}
    command = [sys.executable, "-c", IN_PROCESS, str(REPO), str(file)]
    done = subprocess.run(command, env=environment, cwd=comfyui.base_dir, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@thorough  # a process of its own, which takes as long as 20 others
@pytest.mark.parametrize(
    "what",
    [
        "MultiGPU CFG Split",
        "Wrapping weights",
        "Replacing diffusion_model.img_in",
        "an attention override",
        "changed positions that are no numbers",
        "attention_mask in the conditioning",
        "attention_mask in the conditioning (step by step)",
        "attention_mask in the conditioning (Parallel Sampler)",
    ],
)
def test_what_needs_gpus_or_other_packs_or_large_files_is_refused_too(said_in_process, what):
    assert_one_sentence(said_in_process[what])
    begins = re.escape(what.partition(" (")[0])
    assert re.match(rf"{begins}( \([^)]+\))? cannot be ", said_in_process[what])


# -- files

SCHNELL = flux_tensors(heads=1, double_blocks=1, single_blocks=1)
SCHNELL_FILE = save(SCHNELL)
HEADER = 8 + int.from_bytes(SCHNELL_FILE[:8], "little")
NO_MODEL = "is neither a safetensors nor a GGUF file: download it again, or choose another file."
INCOMPLETE = "choose a complete FluxSchnell file."
UNKNOWN = "is no diffusion model that ComfyUI knows under these tensor names: choose another file."


def without(name: str) -> bytes:
    return save({key: tensor for key, tensor in SCHNELL.items() if key != name})


def with_tensor(name: str, tensor: torch.Tensor) -> bytes:
    return save(SCHNELL | {name: tensor})


def with_header(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


QKV = "double_blocks.0.img_attn.qkv.weight"
FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", f"(0 bytes) {NO_MODEL}"),
    "cut in the length": (SCHNELL_FILE[:4], f"(4 bytes) {NO_MODEL}"),
    "cut in the header": (
        SCHNELL_FILE[:100],
        f"is truncated: its header takes {HEADER} bytes and the file has 100; download it again.",
    ),
    "cut after the header": (
        SCHNELL_FILE[:HEADER],
        f"is truncated: it should have {len(SCHNELL_FILE)} bytes and has {HEADER}; download it again.",
    ),
    "cut in the data": (
        SCHNELL_FILE[:-1],
        f"is truncated: it should have {len(SCHNELL_FILE)} bytes and has {len(SCHNELL_FILE) - 1}; download it again.",
    ),
    "a pickle": (
        b"PK\x03\x04" + bytes(range(256)) * 8,
        "is a PyTorch pickle, which is not supported (it can run code)",
    ),
    "text": (b"<!DOCTYPE html><html>Not found</html>" * 9, f"(333 bytes) {NO_MODEL}"),
    "a header that is no JSON": (with_header(b"{'a': 1}"), "has a damaged header"),
    "a header nested too deeply": (with_header(b"[" * 100_000), "has a damaged header (maximum recursion depth"),
    "a header that is a list": (with_header(b"[1, 2, 3]"), "has a damaged header"),
    "a header with a tensor of no length": (
        with_header(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}'),
        "has a damaged header (tensor a has 4 bytes for 8)",
    ),
    "a header with an unknown type": (
        with_header(b'{"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}'),
        "holds a as F4, a type not supported (F64, F32, F16, BF16, F8_E4M3, F8_E5M2, F8_E8M0, I64, I32, I16, I8, U8, BOOL are): "
        "choose another file.",
    ),
    "no tensors": (save({}), UNKNOWN),
    "Stable Diffusion": (
        save({"model.diffusion_model.input_blocks.0.0.weight": torch.zeros(8, 4, 3, 3)}),
        UNKNOWN,
    ),
    "diffusers' names": (
        save({"x_embedder.weight": torch.zeros(8, 64), "transformer_blocks.0.attn.to_q.weight": torch.zeros(8, 8)}),
        "lacks rows of the tensor x_embedder.bias: choose a complete file.",
    ),
    "FLUX.2, damaged": (
        with_tensor("double_stream_modulation_img.lin.weight", torch.zeros(768, 128)),
        "which does not fit a model of 128 features: choose a complete Flux2 file.",
    ),
    "no img_in": (
        without("img_in.weight"),
        UNKNOWN,
    ),
    "no attention": (
        without("single_blocks.0.linear1.weight"),
        f"lacks the tensor single_blocks.0.linear1.weight: {INCOMPLETE}",
    ),
    "no norm": (
        without("double_blocks.0.txt_attn.norm.key_norm.scale"),
        f"lacks the tensor double_blocks.0.txt_attn.norm.key_norm.weight: {INCOMPLETE}",
    ),
    "too few rows": (
        with_tensor(QKV, torch.zeros(383, 128)),
        f"holds {QKV} with the shape [383, 128], which does not fit a model of 128 features: {INCOMPLETE}",
    ),
    "too many columns": (
        with_tensor(QKV, torch.zeros(384, 129)),
        f"holds {QKV} with the shape [384, 129], which does not fit a model of 128 features: {INCOMPLETE}",
    ),
    "a vector as a scalar": (
        with_tensor("img_in.bias", torch.zeros(())),
        f"holds img_in.bias with the shape [], which does not fit a model of 128 features: {INCOMPLETE}",
    ),
    "a matrix as a scalar": (
        with_tensor("txt_in.weight", torch.zeros(())),
        "has tensors of which ComfyUI can make no model (IndexError: tuple index out of range): choose a complete file.",
    ),
    "features that are no multiple of a head": (
        with_tensor("img_in.weight", torch.zeros(100, 64)),
        f"holds img_in.weight with the shape [100, 64], which does not fit a model of 128 features: {INCOMPLETE}",
    ),
    "int8": (
        with_tensor(QKV, torch.zeros(384, 128, dtype=torch.int8)),
        f"holds {QKV} as I8 in rows of 128 bytes, which is not supported: choose a file with weights in fp32, fp16, bf16 "
        "or fp8, or a GGUF file.",
    ),
}


@pytest.mark.parametrize(("content", "expected"), FILES.values(), ids=FILES)
def test_a_file_that_cannot_work_is_refused_with_what_is_wrong(comfyui, refusal, content, expected):
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

PLANS: dict[str, tuple[dict[str, Any], str]] = {
    "GPUs that are not there": (
        {"devices": "0,1"},
        "devices '0,1' asks for GPU 0, 1, but no GPU is visible: use cpu:2 "
        "(ComfyUI hides GPUs that --cuda-device or CUDA_VISIBLE_DEVICES leave out).",
    ),
    "a GPU that is not there": (
        {"devices": "0"},
        "devices '0' asks for GPU 0, but no GPU is visible: use cpu:2 "
        "(ComfyUI hides GPUs that --cuda-device or CUDA_VISIBLE_DEVICES leave out).",
    ),
    "a fruit": (
        {"devices": "banana"},
        'devices \'banana\' is not understood: write "auto", "all", GPU indices such as "0,1" or "0-3", or "cpu:2".',
    ),
    "nothing": (
        {"devices": ""},
        'devices \'\' is not understood: write "auto", "all", GPU indices such as "0,1" or "0-3", or "cpu:2".',
    ),
    "no CPU worker": ({"devices": "cpu:0"}, "devices 'cpu:0': write cpu:N with N from 1 to 64, such as cpu:2."),
    "too many CPU workers": (
        {"devices": "cpu:1000"},
        "devices 'cpu:1000': write cpu:N with N from 1 to 64, such as cpu:2.",
    ),
    "an odd ulysses": (
        {"devices": "cpu:2", "ulysses": 3},
        "ulysses 3, but there are 2 workers (devices 'cpu:2'): use ring 1 x ulysses 2, or 0 (automatic) for all "
        "of them, or choose other devices.",
    ),
    "too many workers": (
        {"devices": "cpu:2", "ulysses": 2, "ring": 2},
        "ring 2 x ulysses 2 = 4, but there are 2 workers (devices 'cpu:2'): use ring 1 x ulysses 2, or 0 (automatic) for all "
        "of them, or choose other devices.",
    ),
    "more workers than heads": (
        {"devices": "cpu:8", "ulysses": 8},
        "ulysses 8 is more than the model's 4 attention heads: use ring 2 x ulysses 4, or 0 "
        "(automatic) for all of them.",
    ),
    "a ring that leaves more workers than heads": (
        {"devices": "cpu:8", "ring": 1, "data": 1},
        "ring 1, and there are 8 workers: that leaves ulysses 8, more than the model's 4 attention heads; "
        "use ring 2 x ulysses 4, or 0 (automatic) for all of them.",
    ),
    "automatic devices without GPUs": (
        {"devices": "auto", "ulysses": 4, "ring": 1},
        "ulysses 4, but no GPU is visible: use ring 1 x ulysses 1, or 0 (automatic) for all of them, "
        "or write cpu:4 into devices to try it without GPUs.",
    ),
    "more stages than blocks": (
        {"devices": "cpu:4", "pipefusion": 4},
        "pipefusion 4 is more than the model's 3 blocks: use ring 1 x ulysses 4, or 0 (automatic) for all of them.",
    ),
    "stages of other blocks": (
        {"devices": "cpu:2", "pipefusion": 2, "stages": "1,1"},
        "stages '1,1' is 2 stages with 1 + 1 = 2 blocks, but pipefusion 2 needs 2 stages and the model has 3 blocks: write "
        '"1,2", or leave it empty.',
    ),
    "stages that are no numbers": (
        {"devices": "cpu:2", "pipefusion": 2, "stages": "half"},
        "stages 'half' is not understood: write the blocks of each stage, such as \"1,2\", or leave it empty.",
    ),
    "more patches than rows": (
        {"devices": "cpu:2", "pipefusion": 2, "patches": 9},
        "patches 9 is more than the picture's 4 rows of tokens: use patches 4 at most, or a taller picture.",
    ),
    "more groups than pictures": (
        {"devices": "cpu:2", "data": 2},
        "data 2 is more than the batch of 1: use data 1 or a larger batch.",
    ),
    "weights split twice": (
        {"devices": "cpu:2", "pipefusion": 2, "weights": "sharded"},
        "weights sharded cannot be used with pipefusion 2, which splits the weights already: use weights replicated, or "
        "pipefusion 1.",
    ),
    "flash on the CPU": (
        {"devices": "cpu:1", "attention": "flash"},
        "attention flash cannot be used: flash-attn runs on GPUs only and this worker is on the cpu; use auto or sdpa.",
    ),
    "sage on the CPU": (
        {"devices": "cpu:1", "attention": "sage"},
        "attention sage cannot be used: SageAttention runs on GPUs only and this worker is on the cpu; use auto or sdpa.",
    ),
}


@pytest.mark.parametrize(("plan", "expected"), PLANS.values(), ids=PLANS)
def test_a_plan_that_cannot_work_is_refused_with_one_that_does(refusal, plan, expected):
    assert refusal(parallel(small(), **plan)) == expected


def test_two_sides_are_refused_where_there_is_one(refusal):
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


def latent(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[3:5] = torch.tensor([float("nan"), float("inf")])
    return tensor


def from_file(comfyui: ComfyUI, tensor: torch.Tensor, name: str = "wrong") -> Graph:
    """Starts from a latent in a file."""
    tensors = {"latent_tensor": tensor, "latent_format_version_0": torch.tensor([])}
    save_file(tensors, comfyui.input_dir / f"{name}.latent")
    graph = on_one_worker(small(denoise=0.5))
    graph["latent"] = node("LoadLatent", latent=f"{name}.latent")
    return graph


TAKES = f"and FluxSchnell takes [batch, {CHANNELS}, height, width]: use the empty latent or the VAE that belongs to this model."
EMPTY = "which is empty: use a batch of at least 1 and at least 16 x 16 pixels."
LATENTS: dict[str, tuple[torch.Tensor, str]] = {
    "no width": (latent(1, CHANNELS, 8, 0), f"the latent has the shape [1, 16, 8, 0], {EMPTY}"),
    "no height": (latent(1, CHANNELS, 0, 8), f"the latent has the shape [1, 16, 0, 8], {EMPTY}"),
    "no pictures": (latent(0, CHANNELS, 8, 8), f"the latent has the shape [0, 16, 8, 8], {EMPTY}"),
    "4 channels": (latent(1, 4, 8, 8), f"the latent has the shape [1, 4, 8, 8] {TAKES}"),
    "a video": (latent(1, CHANNELS, 2, 8, 8), f"the latent has the shape [1, 16, 2, 8, 8] {TAKES}"),
    "NaN": (
        with_nan(latent(1, CHANNELS, 8, 8)),
        "the latent holds 2 values of 1024 that are NaN or infinite: look at the node it comes from "
        "(a text encoder or VAE in too low a precision does that).",
    ),
}


@pytest.mark.parametrize(("tensor", "expected"), LATENTS.values(), ids=LATENTS)
def test_a_latent_that_cannot_work_is_refused_with_its_numbers(comfyui, refusal, tensor, expected):
    assert refusal(from_file(comfyui, tensor)) == expected


def conditioning(**settings: Any) -> Callable[[Path], Any]:
    return lambda path: save_conditioning(path, **{"tokens": 5} | settings)


def nan_in(name: str) -> Callable[[Path], Any]:
    tensors = {"cond": torch.zeros(1, 5, TEXT_WIDTH), "pooled_output": torch.zeros(1, POOLED_WIDTH)}
    with_nan(tensors[name])
    return lambda path: save_file(tensors, path)


ENCODER = "FluxSchnell takes [batch, tokens, 64]: use the text encoder that belongs to this model."
PRECISION = "look at the node it comes from (a text encoder or VAE in too low a precision does that)."
CONDITIONINGS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "narrow text": (
        conditioning(width=32),
        f"the conditioning's text is of the shape [1, 5, 32] and {ENCODER}",
    ),
    "wide text": (conditioning(width=96), f"the conditioning's text is of the shape [1, 5, 96] and {ENCODER}"),
    "narrow pooled text": (
        conditioning(pooled_width=16),
        "the conditioning's pooled text is 16 wide and FluxSchnell takes 32: use the text encoders that belong to this model.",
    ),
    "no tokens": (
        conditioning(tokens=0),
        "the conditioning's text has the shape [1, 0, 64] and at least one token is needed: encode a prompt.",
    ),
    "NaN in the text": (
        nan_in("cond"),
        f"the conditioning (context) holds 2 values of 320 that are NaN or infinite: {PRECISION}",
    ),
    "NaN in the pooled text": (
        nan_in("pooled_output"),
        f"the conditioning (y) holds 2 values of 32 that are NaN or infinite: {PRECISION}",
    ),
}


@pytest.mark.parametrize("way", [dict, step_by_step], ids=["in the loop", "step by step"])
@pytest.mark.parametrize(("write", "expected"), CONDITIONINGS.values(), ids=CONDITIONINGS)
def test_a_conditioning_that_cannot_work_is_refused_with_its_numbers(comfyui, refusal, write, expected, way):
    write(comfyui.input_dir / "wrong.safetensors")
    assert refusal(way(on_one_worker(small(positive="wrong")))) == expected
