"""Unsharded models through Load Parallel Diffusion Model: the stock loader's result under cfg and data."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import pytest
import requests
import torch
from safetensors.torch import load_file, save_file

from scripts.comfyui import ComfyUI
from tests.derive.files import save_checkpoint
from tests.refusals.unsharded import PLANS, no_negative, other_control, other_text, save, sound, swapped, zero123
from tests.support.graphs.comfyui import DIFFERENT, TOLERANCE, LatentOf, graph_of, save_families, spread, with_tensors
from tests.support.graphs.diffusers import refused
from tests.support.graphs.family_checks import assert_matters_and_stock, assert_stock
from tests.support.graphs.family_tests import Layers, save_lora_of, save_with_prompts
from tests.support.graphs.flux import Graph, controlled, insert_after_model, node, queue_logged
from tests.support.graphs.loras import save_lora, with_lora
from tests.support.graphs.unsharded import SIZE, SPLITS, batched
from tests.support.latents import relative_error, saved_latent
from tests.support.selection import thorough
from tests.support.tiny.controlnet import SDXL, save_of_unet
from tests.support.tiny.models import draw
from tests.vae.comfy_vaes import save_image_vae

LAYERS: Layers = {
    "sd15": ("input_blocks.1.1.transformer_blocks.0.attn1.to_q", "middle_block.1.transformer_blocks.0.ff.net.0.proj"),
    "sdxl": ("input_blocks.3.1.transformer_blocks.1.attn2.to_v", "time_embed.2", "label_emb.0.0"),
}


FLUX2 = "flux2-full.safetensors"
SMALL = {"width": 32, "height": 24}
"""Pixels of a small picture: 4 x 3 in the latent, and 2 x 2 at the next scale."""

CONTROL = {
    "net": node("ControlNetLoader", control_net_name="sd15.safetensors"),
    "image": node("EmptyImage", **SIZE, batch_size=1, color=0x4080C0),
}


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save(comfyui)
    save_with_prompts(comfyui, "sdxl")
    save_families(comfyui, "flux2")
    models = comfyui.base_dir / "models"
    for name, layers in LAYERS.items():
        save_lora_of(comfyui, name, layers)
        tensors = load_file(models / "diffusion_models" / f"{name}.safetensors")
        save_lora(models / "loras" / f"{name}-other-lora.safetensors", (f"diffusion_model.{layers[0]}",), tensors)
    full = {f"model.diffusion_model.{key}": tensor for key, tensor in tensors.items()}  # of SDXL, in v-prediction
    vae = save_image_vae(models / "vae" / "whole.safetensors", name="sd")
    full |= {f"first_stage_model.{key}": tensor for key, tensor in load_file(vae).items()} | {"v_pred": torch.zeros(0)}
    save_checkpoint(models / "checkpoints" / FLUX2, load_file(models / "diffusion_models" / "flux2.safetensors"), {})
    save_file(full, models / "checkpoints" / "sdxl-v.safetensors")
    save_of_unet(models / "controlnet" / "sd15.safetensors")


@thorough  # in the quick run two LoRAs have data 2, a checkpoint has SDXL under cfg 2, and test_nodes one worker
@pytest.mark.parametrize(
    ("name", "split"),
    [pytest.param(name, SPLITS[split], id=f"{name}-{split}") for name in ("sd15", "sdxl") for split in SPLITS],
)
def test_every_split_gives_the_stock_result(name: str, split: dict[str, Any], latent_of: LatentOf) -> None:
    graph = batched(graph_of(name, steps=2), 3)
    assert_stock(latent_of, graph, **split)


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("sd15", "data 2"),
        *(pytest.param(*case, marks=thorough) for case in product(LAYERS, ("cfg 2", "data 2, cfg 2"))),
    ],
)
def test_two_loras_give_the_stock_result(name: str, split: str, latent_of: LatentOf) -> None:
    plain = batched(graph_of(name, steps=2), 3, SMALL)
    graph = with_lora(with_lora(plain, name, 0.8), f"{name}-other", -0.5)
    assert_matters_and_stock(latent_of, plain, graph, **SPLITS[split])


COSTS = re.compile(
    r"Parallel: the ControlNet ran (\d+) times in ComfyUI's process \(\d+\.\d+ s a step\)\. Sending its output to the workers "
    r"\((\d.*B) a step\) took \d+\.\d+ s a step$",
    re.MULTILINE,
)


def test_a_controlnet_runs_as_often_as_with_the_stock_loader(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    """The texts have two lengths, so ComfyUI goes through each call of heun twice. The latent equals the stock loader's.

    The log has the ControlNet's cost, without the seconds that the second worker saves, which are not predicted on the CPU.
    """
    plain = batched(graph_of("sd15", steps=2, sampler_name="heun"), 2, SMALL)
    graph = plain | CONTROL | {"counted": node("PackCountedControl", control_net=["net", 0])}
    graph = controlled(graph, strength=0.7, net="counted")
    ours = spread(graph, strict=False, **SPLITS["cfg 2"])
    runs, logs = zip(*(queue_logged(comfyui, each) for each in (graph, ours)), strict=True)
    stock, found = (saved_latent(comfyui, run.check()) for run in runs)
    assert relative_error(found, stock) <= TOLERANCE
    assert relative_error(latent_of(plain), stock) > DIFFERENT
    counts = [log.count("the network of a ControlNet runs") for log in logs]
    assert counts == [6, 6]
    # A step has the tiny ControlNet's output for both branches, two tensors of 320 x 3 x 4 and three of 320 x 2 x 2 in fp32.
    # A batch of two has twice these tensors, and two steps of heun have three calls.
    assert COSTS.findall(logs[1]) == [("6", "276 kB")]
    assert not any("Sending the ControlNet's output" in text.text for text in runs[1].texts)


CONVOLUTION = "diffusion_model.input_blocks.1.0.in_layers.2"
CONVOLUTIONS: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "LoCon": {"lora_up.weight": (320, 4, 1, 1), "lora_down.weight": (4, 320, 3, 3)},
    "LoHa": {"hada_w1_a": (320, 4), "hada_w1_b": (4, 2880), "hada_w2_a": (320, 4), "hada_w2_b": (4, 2880)},
    "LoKr": {"lokr_w1": (8, 8), "lokr_w2": (40, 40, 3, 3)},
    "difference": {"diff": (320, 320, 3, 3)},
}
"""The tensors that change a convolution, by kind of adapter."""


@thorough
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_adapters_of_a_convolution_give_the_stock_result(kind: str, comfyui: ComfyUI, latent_of: LatentOf) -> None:
    shapes = enumerate(CONVOLUTIONS[kind].items())
    tensors = {f"{CONVOLUTION}.{name}": 0.5 * draw(*shape, seed=seed) for seed, (name, shape) in shapes}
    save_file(tensors, comfyui.base_dir / "models" / "loras" / f"{kind}-lora.safetensors")
    plain = batched(graph_of("sd15", steps=2), 1)
    graph = with_lora(plain, kind, 0.8)
    assert_matters_and_stock(latent_of, plain, graph, cfg=2)


@thorough  # in the quick run test_keeping_step combines texts of two lengths on FLUX.1, and denoise/test_prompts has the ranges
def test_texts_of_other_lengths_and_ranges_give_the_stock_result(latent_of: LatentOf) -> None:
    """Each combined text has a range, in the loop. ComfyUI repeats the shorter text; the workers run the texts separately."""
    graph = batched(graph_of("sd15", steps=3), 1)
    graph["first"] = node("ConditioningSetTimestepRange", conditioning=["positive", 0], start=0.0, end=0.6)
    graph["both"] = node("ConditioningCombine", conditioning_1=["first", 0], conditioning_2=["negative", 0])
    graph["sampler"]["inputs"]["positive"] = ["both", 0]
    assert_stock(latent_of, graph, cfg=2)


@thorough  # in the quick run test_keeping_step has an area and a mask on FLUX.1
@pytest.mark.parametrize("split", ["cfg 2", "data 2, cfg 2"])
def test_an_area_and_a_mask_give_the_stock_result(split: str, latent_of: LatentOf) -> None:
    size = {"width": 96, "height": 72}  # an area has at least 64 pixels
    graph = batched(graph_of("sd15", steps=2), 2, size)
    graph |= {
        "area": node("ConditioningSetArea", conditioning=["negative", 0], width=64, height=64, x=16, y=8, strength=0.7),
        "mask": node("SolidMask", value=0.5, **size),
        "masked": node(
            "ConditioningSetMask", conditioning=["positive", 0], mask=["mask", 0], strength=0.9, set_cond_area="default"
        ),
        "both": node("ConditioningCombine", conditioning_1=["area", 0], conditioning_2=["masked", 0]),
        "all": node("ConditioningCombine", conditioning_1=["both", 0], conditioning_2=["positive", 0]),
    }
    graph["sampler"]["inputs"]["positive"] = ["all", 0]
    assert_stock(latent_of, graph, strict=False, **SPLITS[split])


@thorough  # in the quick run the test that counts a ControlNet's runs, with heun and a batch under cfg 2
@pytest.mark.parametrize("sampler", ["euler", "heun"])
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_a_controlnet_gives_the_stock_result(split: dict[str, Any], sampler: str, latent_of: LatentOf) -> None:
    plain = batched(graph_of("sd15", steps=2, sampler_name=sampler), 2)
    graph = controlled(plain | CONTROL, strength=0.7, end=0.8)
    assert_matters_and_stock(latent_of, plain, graph, strict=False, **split)


@thorough  # in the quick run two LoRAs and a ControlNet on Stable Diffusion 1.5, and a checkpoint of SDXL
@pytest.mark.parametrize("split", ["cfg 2", "data 2, cfg 2"])
def test_sdxl_with_two_loras_and_a_controlnet_gives_the_stock_result(
    split: str, comfyui: ComfyUI, latent_of: LatentOf
) -> None:
    save_of_unet(comfyui.base_dir / "models" / "controlnet" / "sdxl.safetensors", SDXL)
    plain = batched(graph_of("sdxl", steps=2), 2)
    plain = with_lora(with_lora(plain, "sdxl", 0.8), "sdxl-other", -0.5)
    net = {"net": node("ControlNetLoader", control_net_name="sdxl.safetensors")}
    graph = controlled(plain | CONTROL | net, strength=0.7)
    assert_matters_and_stock(latent_of, plain, graph, strict=False, **SPLITS[split])


@thorough  # in the quick run the count of a ControlNet's runs has two calls, and test_controlnet_on_flux two ControlNets in a row
def test_a_controlnet_with_texts_that_make_two_calls_gives_the_stock_result(latent_of: LatentOf) -> None:
    """The two calls of a picture run on two workers. Two ControlNets in a row give the stock result, also on one branch only."""
    graph = controlled(batched(graph_of("sd15", steps=2), 1) | CONTROL, strength=0.7)
    graph["again"] = CONTROL["net"]
    graph = controlled(graph, strength=0.3, start=0.3, net="again")
    assert_stock(latent_of, graph, devices="cpu:2", strict=False, cfg=2)
    graph["sampler"]["inputs"]["negative"] = ["negative", 0]
    assert_stock(latent_of, graph, devices="cpu:2", strict=False, cfg=2)


@thorough  # in the quick run test_other_packs changes the batches of the second pass, without a ControlNet
@pytest.mark.parametrize("kind", ["another formula of memory", "memory that becomes free", "memory that is taken"])
def test_a_controlnet_gives_the_stock_result_when_memory_changes_within_a_step(kind: str, latent_of: LatentOf) -> None:
    """The batches of ComfyUI's second pass of a step do not change the ControlNet's output."""
    graph = insert_after_model(batched(graph_of("sd15", steps=2), 1), "PackModel", kind=kind) | CONTROL
    graph = controlled(graph, strength=0.7)
    assert_stock(latent_of, graph, devices="cpu:2", strict=False, cfg=2)


def test_boxes_for_words_are_refused_by_name(comfyui: ComfyUI) -> None:
    """GLIGEN's network attends within the model's blocks."""
    graph = with_tensors(comfyui, graph_of("sd15"), "whole-gligen", {"gligen": torch.ones(1)})
    assert refused(comfyui, spread(graph, "cpu:1", strict=False)).startswith(
        "GLIGEN cannot be used with a parallel MODEL"
    )


def test_a_checkpoint_keeps_its_prediction_type_and_its_vae(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    """The checkpoint has a mark of v-prediction, which Load Diffusion Model does not read, and a VAE."""
    plain = batched(graph_of("sdxl", steps=1), 1, SMALL)
    graph = plain | {
        "model": node("CheckpointLoaderSimple", ckpt_name="sdxl-v.safetensors"),
        "pixels": node("VAEDecode", samples=["sampler", 0], vae=["model", 2]),
        "encoded": node("VAEEncode", pixels=["pixels", 0], vae=["model", 2]),
        "saved": node("SaveLatent", samples=["encoded", 0], filename_prefix="decoded"),
    }
    ours = graph | {
        "plan": node("ParallelPlan", devices="cpu:2", cfg=2),
        "model": node("LoadParallelCheckpoint", ckpt_name="sdxl-v.safetensors", plan=["plan", 0]),
        "sampler": node("ParallelSampler", **graph["sampler"]["inputs"]),
    }
    runs = [comfyui.queue(each).check() for each in (ours, graph)]
    for name in ("save", "saved"):
        found, stock = (saved_latent(comfyui, run, name) for run in runs)
        assert relative_error(found, stock) <= TOLERANCE
    assert relative_error(latent_of(plain), saved_latent(comfyui, runs[1])) > DIFFERENT


def test_use_all_gpus_accepts_the_loaders_of_unsharded_models(comfyui: ComfyUI) -> None:
    loaders = {"CheckpointLoaderSimple": "sdxl-v.safetensors", "UNETLoader": "sd15.safetensors"}
    asked = [{"kind": kind, "file": file} for kind, file in loaders.items()]
    judged = requests.post(f"{comfyui.url}/parallel/loaders", json=asked, timeout=60).json()
    assert judged == [{"swap": True, "why": ""}] * 2


def test_a_checkpoint_of_a_sequence_parallel_model_gives_the_stock_result(latent_of: LatentOf) -> None:
    """The checkpoint holds FLUX.2's diffusion model under a checkpoint's names, without a VAE."""
    graph = graph_of("flux2", steps=2) | {"model": node("CheckpointLoaderSimple", ckpt_name=FLUX2)}
    ours = spread(graph, ulysses=2)
    ours["model"] = node("LoadParallelCheckpoint", ckpt_name=FLUX2, plan=["plan", 0])
    assert relative_error(latent_of(ours), latent_of(graph)) <= TOLERANCE


PARTS: Mapping[str, Graph] = {
    "sdxl-v.safetensors": {  # has no text encoder
        "text": node("CLIPTextEncode", text="a word", clip=["model", 1]),
        "save": node("SaveConditioning", conditioning=["text", 0], filename_prefix="none"),
    },
    FLUX2: {  # has no VAE
        "latent": node("EmptyLatentImage", width=64, height=64, batch_size=1),
        "pixels": node("VAEDecode", samples=["latent", 0], vae=["model", 2]),
        "save": node("SaveImage", images=["pixels", 0], filename_prefix="none"),
    },
}
"""Checkpoints that lack a part, and nodes that use this part."""


@pytest.mark.parametrize(
    "name", [pytest.param("sdxl-v.safetensors", marks=thorough), FLUX2]
)  # the message is ComfyUI's
def test_a_checkpoint_without_a_part_says_so_in_comfyuis_words(name: str, comfyui: ComfyUI) -> None:
    said = []
    for loader in ("CheckpointLoaderSimple", "LoadParallelCheckpoint"):
        graph = PARTS[name] | {"model": node(loader, ckpt_name=name)}
        error = comfyui.queue(graph).error
        assert error is not None
        said.append(error.exception_message)
    assert said[0] == said[1]


@pytest.mark.parametrize(("plan", "said"), PLANS.values(), ids=PLANS)
def test_a_plan_that_unsharded_models_do_not_support_is_refused(
    plan: dict[str, Any], said: str, comfyui: ComfyUI
) -> None:
    assert refused(comfyui, spread(graph_of("sd15"), **plan)) == said


@pytest.mark.parametrize(
    "case",
    [
        no_negative,
        sound,
        other_text,
        swapped,
        # in the quick run refusals/lists refuses the output of a ControlNet of another size on FLUX.1
        pytest.param(other_control, marks=thorough),
        zero123,
    ],
)
def test_a_graph_that_unsharded_models_do_not_support_is_refused(
    case: Callable[[], tuple[Graph, str]], comfyui: ComfyUI
) -> None:
    graph, said = case()
    assert said in refused(comfyui, graph)
