"""Load Parallel CLIP in a real ComfyUI gives the same conditioning as ComfyUI's own loaders, bit by bit."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from parallel_backend.worker.process.environment import FAULT_FILE
from scripts.comfyui import ComfyUI, Graph, QueuedRun
from tests.support.copies.changed import copied
from tests.support.graphs.comfyui import TOLERANCE, LatentOf, graph_of, save_families, spread
from tests.support.graphs.flux import beside, node
from tests.support.graphs.unsharded import batched
from tests.support.latents import relative_error
from tests.support.selection import thorough
from tests.support.tiny.text_encoders import NARROW, narrow_sizes, save_narrow, save_scaled_fp8, save_text_encoder

TYPES = {"t5-base": "stable_audio", "qwen3-0.6b": "qwen_image", "scaled-fp8": "qwen_image"}
"""Text encoders, with the type to load each."""

DRAWN = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.05, "seed": 7}
"""Settings by which Generate Text draws tokens."""

PROMPT = "a (red:1.3) fox jumps over a lazy dog, oil on canvas"


@pytest.fixture(scope="module")
def server(comfyui: ComfyUI) -> ComfyUI:
    """Provide a ComfyUI with the file of CLIP-L."""
    (comfyui.base_dir / "models" / "text_encoders").mkdir(exist_ok=True)
    save(comfyui, "clip-l")
    return comfyui


def save(server: ComfyUI, name: str) -> None:
    """Write the file of a text encoder, unless it is there."""
    path = server.base_dir / "models" / "text_encoders" / f"{name}.safetensors"
    if not path.exists():
        save_scaled_fp8(path, "qwen3-0.6b") if name == "scaled-fp8" else save_text_encoder(path, name)


def encoding(loader: dict[str, Any], prompt: str = PROMPT) -> Graph:
    """Return a graph that encodes a prompt and saves the conditioning."""
    return {
        "clip": loader,
        "text": node("CLIPTextEncode", clip=["clip", 0], text=prompt),
        "all": node("PackEverything", conditioning=["text", 0]),
        "save": node("SaveConditioning", conditioning=["all", 0], filename_prefix="text"),
    }


def parallel(graph: Graph, workers: int) -> Graph:
    """Return the graph with Load Parallel CLIP as its loader."""
    changed = {**graph, "plan": node("ParallelPlan", devices=f"cpu:{workers}")}
    changed["clip"] = node("LoadParallelCLIP", **graph["clip"]["inputs"], plan=["plan", 0])
    return changed


def assert_encoded(server: ComfyUI, graph: Graph, workers: int = 2) -> None:
    """Assert that Load Parallel CLIP gives the conditioning of a graph with ComfyUI's loader."""
    run = server.queue(beside(parallel(graph, workers), graph), timeout=500).check()
    ours, theirs = (filed(server, run, f"{side}save")["cond"] for side in ("", "stock "))
    assert torch.equal(ours, theirs)
    assert theirs.std() > 0.01


def filed(server: ComfyUI, run: QueuedRun, node_id: str) -> dict[str, Tensor]:
    """Return the tensors of the conditioning that a node of a run saved, by name."""
    (saved,) = run.outputs[node_id]["conditioning"]
    return load_file(server.input_dir / saved["filename"])


@thorough  # in the quick run the texts below; models/test_divided_blocks has the classes, clip/test_files the files
@pytest.mark.parametrize("name", TYPES)
def test_prompts_are_encoded_bit_by_bit_as_by_comfyuis_loader(server: ComfyUI, name: str) -> None:
    save(server, name)
    assert_encoded(server, encoding(node("CLIPLoader", clip_name=f"{name}.safetensors", type=TYPES[name])), workers=3)


@pytest.fixture(scope="module")
def lora(server: ComfyUI) -> str:
    """Provide the file of a LoRA of CLIP-L."""
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for block in (0, 7, 11):
        for layer, (rows, columns) in {"self_attn_q_proj": (768, 768), "mlp_fc2": (768, 3072)}.items():
            name = f"lora_te_text_model_encoder_layers_{block}_{layer}"
            tensors[f"{name}.lora_up.weight"] = torch.randn(rows, 4, generator=generator)
            tensors[f"{name}.lora_down.weight"] = 0.02 * torch.randn(4, columns, generator=generator)
            tensors[f"{name}.alpha"] = torch.tensor(2.0)
    save_file(tensors, server.base_dir / "models" / "loras" / "clip-l.safetensors")
    return "clip-l.safetensors"


def clip_l() -> dict[str, Any]:
    """Return ComfyUI's loader of CLIP-L."""
    return node("CLIPLoader", clip_name="clip-l.safetensors", type="stable_diffusion")


def with_changes(lora: str) -> Graph:
    """Return a graph that encodes a prompt by a text encoder as it is, with a LoRA, with clip skip and with scaled attention."""
    graph: Graph = {
        "clip": clip_l(),
        "model": node("UNETLoader", unet_name="narrow-schnell.safetensors", weight_dtype="default"),
        "lora": node(
            "LoraLoader", model=["model", 0], clip=["clip", 0], lora_name=lora, strength_model=0.0, strength_clip=0.8
        ),
        "skip": node("CLIPSetLastLayer", clip=["lora", 1], stop_at_clip_layer=-3),
        "scaled": node("CLIPAttentionMultiply", clip=["skip", 0], q=1.2, k=0.9, v=1.0, out=1.1),
    }
    for number, clip in enumerate((["clip", 0], ["lora", 1], ["skip", 0], ["scaled", 0], ["clip", 0])):
        graph[f"text{number}"] = node("CLIPTextEncode", clip=clip, text=f"{PROMPT} embedding:fox {number % 4}")
        graph[f"save{number}"] = node("SaveConditioning", conditioning=[f"text{number}", 0], filename_prefix="text")
    return graph


def test_every_copy_of_a_text_encoder_has_its_own_lora_and_layer_and_knows_learned_words(
    server: ComfyUI, lora: str
) -> None:
    words = server.base_dir / "models" / "embeddings" / "fox.safetensors"
    words.parent.mkdir(exist_ok=True)
    save_file({"emb_params": torch.randn(2, 768, generator=torch.Generator().manual_seed(5))}, words)
    graph = with_changes(lora)
    run = server.queue(beside(parallel(graph, 2), graph), timeout=500).check()
    ours, theirs = ([filed(server, run, f"{side}save{text}")["cond"] for text in range(5)] for side in ("", "stock "))
    assert all(torch.equal(mine, stock) for mine, stock in zip(ours, theirs, strict=True))
    assert not any(torch.equal(theirs[0], other) for other in theirs[1:4])
    assert torch.equal(theirs[0], theirs[4])
    graph["text0"]["inputs"]["text"] = f"{PROMPT} 0"
    run = server.queue({name: graph[name] for name in ("clip", "text0", "save0")}, timeout=500).check()
    assert not torch.equal(filed(server, run, "save0")["cond"], theirs[0]), "the learned word counts"


@pytest.mark.parametrize("second", ["clip-l.safetensors", "checkpoints/clip-l.safetensors", "full.safetensors"])
def test_a_second_file_of_the_wrong_kind_is_refused(server: ComfyUI, second: str) -> None:
    folder = server.base_dir / "models" / "checkpoints"
    folder.mkdir(exist_ok=True)
    for name in ("clip-l.safetensors", "full.safetensors"):
        if not (folder / name).exists():
            os.link(server.base_dir / "models" / "text_encoders" / "clip-l.safetensors", folder / name)
    refused = node("LoadParallelCLIP", clip_name="clip-l.safetensors", clip_name2=second, type="flux")
    message = str(server.queue({**encoding(refused)}, timeout=300).error)
    assert f"clip-l.safetensors, {Path(second).name} lacks the tensor" in message


def test_an_encoder_that_cannot_write_text_fails_as_in_comfyui_and_encodes_the_next_prompt(server: ComfyUI) -> None:
    writing: Graph = {
        "clip": clip_l(),
        "text": node("TextGenerate", clip=["clip", 0], prompt="a fox", max_length=4, sampling_mode="off"),
        "show": node("PreviewAny", source=["text", 0]),
    }
    theirs = str(server.queue(writing, timeout=300).error)
    ours = str(server.queue(parallel(writing, 2), timeout=300).error)
    assert "has no attribute 'generate'" in theirs
    assert "has no attribute 'generate'" in ours
    assert_encoded(server, encoding(clip_l(), "a (prompt:1.2) after a text"))


@thorough  # models/test_divided_blocks.py has the class in small
def test_an_encoder_with_vision_encodes_a_picture_and_writes_the_same_text(server: ComfyUI) -> None:
    save(server, "qwen3.5-0.8b")
    loader = node("CLIPLoader", clip_name="qwen3.5-0.8b.safetensors", type="stable_diffusion")
    graph: Graph = {
        "clip": loader,
        "picture": node("EmptyImage", width=96, height=64, batch_size=1, color=0x3366AA),
        "text": node(
            "TextGenerate",
            clip=["clip", 0],
            prompt="a fox",
            image=["picture", 0],
            max_length=6,
            sampling_mode="on",
            **{f"sampling_mode.{name}": value for name, value in DRAWN.items()},
        ),
        "show": node("PreviewAny", source=["text", 0]),
    }
    ours, theirs = (
        server.queue(each, timeout=800).check().outputs["show"]["text"] for each in (parallel(graph, 3), graph)
    )
    assert ours == theirs
    assert any(ours)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"changed": node("CLIPSave", clip=["clip", 0], filename_prefix="clip")}, "Saving the text encoder"),
        (
            {
                "changed": node("CLIPMergeSimple", clip1=["clip", 0], clip2=["clip", 0], ratio=0.5),
                "text": node("CLIPTextEncode", clip=["changed", 0], text=PROMPT),
            },
            "Merging text encoders",
        ),
    ],
)
def test_nodes_that_need_the_weights_here_are_refused_by_name(server: ComfyUI, changed: Graph, words: str) -> None:
    message = str(server.queue(parallel(encoding(clip_l()), 2) | changed, timeout=300).error)
    assert words in message
    assert "use Load CLIP" in message


def test_a_killed_worker_is_one_clear_error_and_the_next_prompt_is_encoded(server: ComfyUI) -> None:
    graph = encoding(clip_l(), "a prompt that nobody has encoded yet")
    fault = Path(server.env[FAULT_FILE])
    fault.write_text("rank=1,phase=encoding the prompt,kind=kill")
    run = server.queue(parallel(graph, 2), timeout=300)
    assert "Worker 1 of 2" in str(run.error)
    assert_encoded(server, graph)


@thorough  # models/test_divided_blocks.py cancels a call on ranks
def test_a_prompt_of_20000_tokens_is_encoded_and_another_is_cancelled(server: ComfyUI) -> None:
    """ComfyUI encodes a long prompt of CLIP-L in parts of 77 tokens, all in one batch."""
    long = "fox " * 20_000
    assert_encoded(server, encoding(clip_l(), long))
    prompt = server.submit(parallel(encoding(clip_l(), f"two {long}"), 2))
    time.sleep(2.0)
    server.interrupt()
    run = server.wait(prompt, timeout=120)
    assert run.status == "interrupted"
    assert_encoded(server, encoding(clip_l(), "a third prompt"))


SEVERAL = (
    ("DualCLIPLoader", "sdxl", ("clip-l", "clip-g")),
    ("DualCLIPLoader", "flux", ("clip-l", "t5-xxl")),
    ("TripleCLIPLoader", "sd3", ("clip-l", "clip-g", "t5-xxl")),
)
"""ComfyUI's loaders of several files, with the type that they load and the files."""


@thorough  # models/test_divided_blocks.py has the classes
def test_text_encoders_of_several_files_encode_bit_by_bit_as_by_comfyuis_loaders(tmp_path: Path) -> None:
    """The copy of ComfyUI knows narrow ones of CLIP-G and T5 XXL."""
    server = copied(tmp_path, "README.md", "ComfyUI", "ComfyUI")
    folder = server.base_dir / "models" / "text_encoders"
    folder.mkdir(exist_ok=True)
    save(server, "clip-l")
    for name, (file, _) in NARROW.items():
        (tmp_path / "ComfyUI" / file).write_text(json.dumps(narrow_sizes(name)))
        save_narrow(folder / f"{name}.safetensors", name)
    with server:
        for loader, kind, names in SEVERAL:
            files = [f"{name}.safetensors" for name in names]
            stock = {f"clip_name{number}": file for number, file in enumerate(files, 1)}
            ours = dict(zip(("clip_name", "clip_name2", "clip_name3"), files, strict=False))
            typed = {"type": kind} if loader == "DualCLIPLoader" else {}
            graph = {
                "clip": node(loader, **stock, **typed),
                "text": node("CLIPTextEncode", clip=["clip", 0], text=PROMPT),
                "save": node("SaveConditioning", conditioning=["text", 0], filename_prefix="text"),
            }
            divided = {**graph, "plan": node("ParallelPlan", devices=f"cpu:{len(names)}")}
            divided["clip"] = node("LoadParallelCLIP", **ours, type=kind, plan=["plan", 0])
            run = server.queue(beside(divided, graph), timeout=500).check()
            equal, theirs = filed(server, run, "save"), filed(server, run, "stock save")
            assert len(theirs) > 1, "the texts and what is pooled"
            assert {name: torch.equal(equal[name], theirs[name]) for name in equal} == dict.fromkeys(theirs, True)
            assert theirs["cond"].std() > 0.01


@thorough  # in the quick run the page's tests swap both loaders, and other tests have workers with several models
def test_a_model_and_its_text_encoder_on_the_same_workers_give_the_stock_latent(
    server: ComfyUI, latent_of: LatentOf
) -> None:
    save_families(server, "sd15")
    graph = batched(graph_of("sd15", steps=2), 1) | {"clip": clip_l()}
    for side, text in (("positive", PROMPT), ("negative", "blurry")):
        graph[side] = node("CLIPTextEncode", clip=["clip", 0], text=text)
    divided = spread(graph, cfg=2)
    divided["clip"] = node("LoadParallelCLIP", **graph["clip"]["inputs"], plan=["plan", 0])
    assert relative_error(latent_of(divided), latent_of(graph)) <= TOLERANCE
