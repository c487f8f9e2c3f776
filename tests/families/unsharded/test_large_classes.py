"""Unsharded classes, small in a copy of ComfyUI that reads sizes from files: the stock loader's result under each split."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.comfyui import ComfyUI
from tests.support.copies.sized import sized_copy
from tests.support.graphs.combined import with_guider
from tests.support.graphs.comfyui import DIFFERENT, TOKENS, TOLERANCE, LatentOf, graph_of, save_latent, spread
from tests.support.graphs.diffusers import refused
from tests.support.graphs.family_checks import assert_stock
from tests.support.graphs.family_tests import save_lora_of, save_with_prompts
from tests.support.graphs.flux import Graph, insert_after, node
from tests.support.graphs.loras import with_lora
from tests.support.graphs.unsharded import SPLITS
from tests.support.latents import relative_error
from tests.support.selection import pairwise, thorough
from tests.support.tiny.comfyui import TINY
from tests.support.tiny.models import draw
from tests.support.tiny.unsharded import PIXEL_DIT

pytestmark = thorough

CLASSES = (
    "cascade_c",
    "cascade_b",
    "hunyuan_dit",
    "cosmos_t2v",
    "cosmos_i2v_whole",
    "z_image_pixel",
    "pixel_dit",
    "pid",
    "hidream_o1",
    "cogvideox_inpaint",
    "causal_wan",
    "triposplat",
    "ace",
    "stable_audio",
    "stable_audio3",
)

CHECKPOINTS: Mapping[str, tuple[tuple[str, ...], int]] = {
    "stable_audio": (("seconds_start", "seconds_total"), 257),
    "stable_audio3": (("seconds_total",), 256),
}
"""Classes whose files are checkpoints: the numbers that the checkpoint embeds, and the width of their embedding."""

BESIDE: Mapping[str, Mapping[str, torch.Tensor]] = {
    "pid": {"lq_latent": draw(1, 16, 2, 3, seed=5), "degrade_sigma": torch.tensor([0.3])},
    "cascade_b": {"stable_cascade_prior": draw(1, 16, 3, 4, seed=6)},
    "cogvideox_inpaint": {"concat_latent_image": draw(1, 32, 3, 8, 10, seed=7)},
}
"""Classes whose own nodes need a VAE or another model's latent, and the tensors that these nodes add to both prompts."""


@pytest.fixture(scope="module")
def comfyui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyUI]:
    """Start the copy of ComfyUI, with the models and their inputs."""
    server = sized_copy(tmp_path_factory.mktemp("whole-sizes"))
    for name in (*CLASSES, "ace15"):
        save_with_prompts(server, name)
        save_latent(server, f"{name}-batch", 3, *TINY[name].latent)
        if name in BESIDE:
            save_file(dict(BESIDE[name]), server.input_dir / f"{name}-given.safetensors")
    save_latent(server, "triposplat-camera", 3, 1, 5)
    save_checkpoints(server)
    save_as_published(server)
    with server:
        yield server


def save_as_published(server: ComfyUI) -> None:
    """Write the classes whose tensors ComfyUI splits in the form of their published files."""
    folder = server.base_dir / "models" / "diffusion_models"
    for name, joined in (
        ("cascade_c", with_joined_heads),
        ("cascade_b", with_joined_heads),
        ("pixel_dit", with_joined_shifts),
    ):
        tensors = load_file(folder / f"{name}.safetensors")
        save_file(joined(tensors), folder / f"{name}.safetensors", TINY[name].metadata)


def with_joined_heads(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return Stable Cascade's tensors with queries, keys and values joined into one tensor."""
    found = {}
    for key, tensor in tensors.items():
        if ".to_q." in key:
            parts = [tensors[key.replace(".to_q.", f".to_{part}.")] for part in "qkv"]
            found[key.replace(".to_q.", ".in_proj_")] = torch.cat(parts)
        elif ".to_k." not in key and ".to_v." not in key:
            found[key] = tensor
    return found


def with_joined_shifts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return PixelDiT's tensors with shifts, scales and gates interleaved for each pixel."""
    width, found = PIXEL_DIT["pixel_hidden_size"], {}
    for key, tensor in tensors.items():
        if "adaLN_modulation_msa." in key:
            pair = (tensor, tensors[key.replace("_msa.", "_mlp.")])
            rows = [each.view(-1, 3, width, *each.shape[1:]) for each in pair]
            name = key.replace("adaLN_modulation_msa.", "adaLN_modulation.0.")
            found[f"core.{name}"] = torch.cat(rows, 1).reshape(-1, *tensor.shape[1:])
        elif "adaLN_modulation_mlp." not in key:
            found[f"core.{key}"] = tensor
    return found


def save_checkpoints(server: ComfyUI) -> None:
    """Write the versions of Stable Audio with the tensors outside the diffusion model that their classes read."""
    models = server.base_dir / "models"
    (models / "checkpoints").mkdir(exist_ok=True)
    for name, (numbers, width) in CHECKPOINTS.items():
        tensors = load_file(models / "diffusion_models" / f"{name}.safetensors")
        full = {f"model.model.{key}": tensor for key, tensor in tensors.items()}
        for seed, number in enumerate(numbers):
            embedder = f"conditioner.conditioners.{number}.embedder.embedding"
            full[f"{embedder}.1.weight"] = draw(768, width, seed=seed + 2) / 16
            full[f"{embedder}.1.bias"] = torch.zeros(768)
            if name == "stable_audio":
                full[f"{embedder}.0.weights"] = draw(128, seed=seed)
        if name == "stable_audio3":
            full["conditioner.conditioners.prompt.padding_embedding"] = draw(768, seed=4)
        save_file(full, models / "checkpoints" / f"{name}.safetensors")


def job(name: str) -> Graph:
    """Return a class's graph for a batch of three, with the stock loader."""
    graph = graph_of(name, steps=2) | {"latent": node("LoadLatent", latent=f"{name}-batch.latent")}
    for side, tokens in TOKENS.items():
        if TINY[name].extra(tokens):
            graph = insert_after(graph, side, "PackPrompt", "conditioning", file=f"{name}-beside-{side}.safetensors")
        if name in BESIDE:
            graph = insert_after(graph, side, "PackPrompt", "conditioning", file=f"{name}-given.safetensors")
    if name == "triposplat":
        graph["camera"] = node("LoadLatent", latent="triposplat-camera.latent")
        graph = insert_after(graph, "latent", "LTXVConcatAVLatent", "video_latent", audio_latent=["camera", 0])
        graph["apart"] = node("LTXVSeparateAVLatent", av_latent=["sampler", 0])
        graph["save"]["inputs"]["samples"] = ["apart", 0]
    if name in CHECKPOINTS:
        graph["model"] = node("CheckpointLoaderSimple", ckpt_name=f"{name}.safetensors")
    return graph


def ours(graph: Graph, **plan: Any) -> Graph:
    """Return a graph on workers, with the parallel loader for its kind of file."""
    inputs = graph["model"]["inputs"]
    parallel = spread(graph, strict=False, **plan)
    if "ckpt_name" in inputs:
        parallel["model"] = node("LoadParallelCheckpoint", **inputs, plan=["plan", 0])
    return parallel


@pairwise(name=CLASSES, split=SPLITS)
def test_every_split_gives_the_stock_result(name: str, split: dict[str, Any], latent_of: LatentOf) -> None:
    graph = job(name)
    assert relative_error(latent_of(ours(graph, **split)), latent_of(graph)) <= TOLERANCE


def test_a_song_whose_batch_cannot_be_divided_is_refused_and_runs_on_one_worker(
    comfyui: ComfyUI, latent_of: LatentOf
) -> None:
    """ACE-Step 1.5's class gives the first row of a call the timbre of all rows, also when both branches share the call."""
    graph = job("ace15")
    for plan in ({"cfg": 2}, {"data": 2}):
        assert "computes the rows of a batch together" in refused(comfyui, ours(graph, **plan))
    sides = graph["sampler"]["inputs"]
    for alike in (graph, graph | {"sampler": node("KSampler", **sides | {"negative": sides["positive"]})}):
        assert_stock(latent_of, alike, strict=False, devices="cpu:1")


def test_a_text_that_a_model_caches_is_not_reused_with_a_lora(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    """HiDream-O1 caches a text's keys by the text only; a LoRA on the model changes these keys."""
    save_lora_of(comfyui, "hidream_o1", ("language_model.layers.0.self_attn.k_proj",))
    graph = job("hidream_o1")
    stock = latent_of(graph)
    changed = latent_of(ours(with_lora(graph, "hidream_o1", 0.8), cfg=2))
    assert relative_error(stock, changed) > DIFFERENT
    again = copy.deepcopy(graph)
    again["save"]["inputs"]["filename_prefix"] = "again"
    assert relative_error(latent_of(ours(again, cfg=2)), stock) <= TOLERANCE


def test_causal_wans_own_sampler_is_refused(comfyui: ComfyUI) -> None:
    """Causal Wan's own sampler calls the model's blocks, which only the workers have."""
    graph = job("causal_wan")
    sides = {side: graph["sampler"]["inputs"][side] for side in TOKENS}
    guider = node("CFGGuider", model=["model", 0], **sides, cfg=1.0)
    graph = with_guider(graph, guider, node("SamplerARVideo", num_frame_per_block=1))
    comfyui.queue(graph).check()
    assert "parallel MODEL" in refused(comfyui, ours(graph, devices="cpu:1"))
