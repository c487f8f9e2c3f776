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
from scripts.comfyui import ComfyUI, Graph
from tests.support.comfy_oracle import comfy_on_path
from tests.support.copies.changed import copied, edit
from tests.support.graphs.comfyui import save_families, spread
from tests.support.graphs.flux import node
from tests.support.graphs.sound import assert_same, both, sound_graph
from tests.support.selection import thorough
from tests.support.tiny.text_encoders import NARROW, narrow_sizes, save_narrow, save_scaled_fp8, save_text_encoder

TYPES = {
    "clip-l": "stable_diffusion",
    "t5-base": "stable_audio",
    "qwen3-0.6b": "qwen_image",
    "scaled-fp8": "qwen_image",
}
"""The type to load each text encoder with."""

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


def conditioning(server: ComfyUI, graph: Graph) -> Tensor:
    """Return all numbers of the conditioning that a graph makes."""
    return filed(server, graph)["cond"]


def filed(server: ComfyUI, graph: Graph) -> dict[str, Tensor]:
    """Return the tensors of the conditioning that a graph saves, by name."""
    (saved,) = server.queue(graph, timeout=500).check().outputs["save"]["conditioning"]
    return load_file(server.input_dir / saved["filename"])


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        # in the quick run the texts below; tests/models/test_divided_blocks.py has the classes on three ranks,
        # tests/clip/test_files.py the files
        pytest.param("clip-l", 2, marks=thorough),
        pytest.param("t5-base", 3, marks=thorough),
        pytest.param("qwen3-0.6b", 3, marks=thorough),
        pytest.param("scaled-fp8", 2, marks=thorough),
    ],
)
def test_prompts_are_encoded_bit_by_bit_as_by_comfyuis_loader(server: ComfyUI, name: str, workers: int) -> None:
    save(server, name)
    graph = encoding(node("CLIPLoader", clip_name=f"{name}.safetensors", type=TYPES[name]))
    ours, theirs = conditioning(server, parallel(graph, workers)), conditioning(server, graph)
    assert torch.equal(ours, theirs)
    assert theirs.std() > 0.01


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


def saved(server: ComfyUI, graph: Graph) -> list[Tensor]:
    """Return the texts that a graph saves, in the order of its nodes."""
    outputs = server.queue(graph, timeout=500).check().outputs
    files = [outputs[name]["conditioning"][0]["filename"] for name in graph if name.startswith("save")]
    return [load_file(server.input_dir / file)["cond"] for file in files]


def test_every_copy_of_a_text_encoder_has_its_own_lora_and_layer_and_knows_learned_words(
    server: ComfyUI, lora: str
) -> None:
    words = server.base_dir / "models" / "embeddings" / "fox.safetensors"
    words.parent.mkdir(exist_ok=True)
    save_file({"emb_params": torch.randn(2, 768, generator=torch.Generator().manual_seed(5))}, words)
    graph = with_changes(lora)
    ours, theirs = saved(server, parallel(graph, 2)), saved(server, graph)
    assert all(torch.equal(mine, stock) for mine, stock in zip(ours, theirs, strict=True))
    assert not any(torch.equal(theirs[0], other) for other in theirs[1:4])
    assert torch.equal(theirs[0], theirs[4])
    graph["text0"]["inputs"]["text"] = f"{PROMPT} 0"
    assert not torch.equal(saved(server, graph)[0], theirs[0]), "the learned word counts"


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
    graph = encoding(clip_l(), "a (prompt:1.2) after a text")
    theirs = conditioning(server, graph)
    assert torch.equal(conditioning(server, parallel(graph, 2)), theirs)
    assert theirs.std() > 0.01


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
        (node("CLIPSave", clip=["clip", 0], filename_prefix="clip"), "Saving the text encoder"),
        (node("CLIPMergeSimple", clip1=["clip", 0], clip2=["clip", 0], ratio=0.5), "Merging text encoders"),
    ],
)
def test_nodes_that_need_the_weights_here_are_refused_by_name(
    server: ComfyUI, changed: dict[str, Any], words: str
) -> None:
    graph = parallel(encoding(clip_l()), 2)
    graph["changed"] = changed
    if changed["class_type"] != "CLIPSave":
        graph["text"]["inputs"]["clip"] = ["changed", 0]
    message = str(server.queue(graph, timeout=300).error)
    assert words in message
    assert "use Load CLIP" in message


def test_a_killed_worker_is_one_clear_error_and_the_next_prompt_is_encoded(server: ComfyUI) -> None:
    graph = encoding(clip_l(), "a prompt that nobody has encoded yet")
    fault = Path(server.env[FAULT_FILE])
    fault.write_text("rank=1,phase=encoding the prompt,kind=kill")
    run = server.queue(parallel(graph, 2), timeout=300)
    assert "Worker 1 of 2" in str(run.error)
    ours, theirs = conditioning(server, parallel(graph, 2)), conditioning(server, graph)
    assert torch.equal(ours, theirs)


@thorough  # models/test_divided_blocks.py cancels a call on ranks
def test_a_prompt_of_20000_tokens_is_encoded_and_another_is_cancelled(server: ComfyUI) -> None:
    """ComfyUI encodes a long prompt of CLIP-L in parts of 77 tokens, all in one batch."""
    long = "fox " * 20_000
    graph = encoding(clip_l(), long)
    assert torch.equal(conditioning(server, parallel(graph, 2)), conditioning(server, graph))
    prompt = server.submit(parallel(encoding(clip_l(), f"two {long}"), 2))
    time.sleep(2.0)
    server.interrupt()
    run = server.wait(prompt, timeout=120)
    assert run.status == "interrupted"
    graph = encoding(clip_l(), "a third prompt")
    assert torch.equal(conditioning(server, parallel(graph, 2)), conditioning(server, graph))


SEVERAL = (
    ("DualCLIPLoader", "sdxl", ("clip-l", "clip-g")),
    ("DualCLIPLoader", "flux", ("clip-l", "t5-xxl")),
    ("TripleCLIPLoader", "sd3", ("clip-l", "clip-g", "t5-xxl")),
)
"""ComfyUI's loaders of several files, with the type that they load and the files."""


@thorough  # models/test_divided_blocks.py has the classes
def test_text_encoders_of_several_files_encode_bit_by_bit_as_by_comfyuis_loaders(tmp_path: Path) -> None:
    """The copy of ComfyUI knows narrow ones of CLIP-G and T5 XXL."""
    server = copied(tmp_path, LLAMA, WIDE, WIDE)
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
            theirs, equal = filed(server, graph), filed(server, divided)
            assert len(theirs) > 1, "the texts and what is pooled"
            assert {name: torch.equal(equal[name], theirs[name]) for name in equal} == dict.fromkeys(theirs, True)
            assert theirs["cond"].std() > 0.01


SIZES = {"hidden_size": 40, "intermediate_size": 64, "num_hidden_layers": 50, "num_attention_heads": 8}
"""Sizes of a small encoder of MiniMax-H3. ComfyUI recognises the encoder by its 50 layers."""

VISION = "hidden_size={}, intermediate_size={}, depth={}, deepstack_visual_indexes=[{}, {}, {}]"
SMALL_VISION = {"hidden_size": 128, "intermediate_size": 64, "depth": 4, "deepstack_visual_indexes": [1, 2, 3]}

LLAMA = "comfy/text_encoders/llama.py"
WIDE = """hidden_size: int = 5120
    intermediate_size: int = 25600
    num_hidden_layers: int = 50
    num_attention_heads: int = 64
"""


def save_small_h3_encoder(path: Path) -> None:
    """Write the file of a small encoder of MiniMax-H3 with random weights."""
    comfy_on_path()
    from comfy.text_encoders import minimax, qwen3vl

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(qwen3vl.QWEN3VL_VISION, "qwen3vl_32b", SMALL_VISION)
        options = {"qwen3vl_32b_model_config": SIZES}
        encoder: Any = minimax.te()(device="cpu", dtype=torch.bfloat16, model_options=options)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, tensor in encoder.qwen3vl_32b.transformer.state_dict().items():
        noise = 0.1 * torch.randn(tensor.shape, generator=generator)
        tensors[name] = (noise if tensor.ndim > 1 else 1 + noise).bfloat16()
    save_file(tensors, path)


@thorough  # models/test_divided_blocks.py has the encoder, with a picture; families/test_minimax_h3.py the model
def test_minimax_h3_gives_the_stock_latents_through_both_nodes(tmp_path: Path) -> None:
    """The encoder and the model share three workers. The copy of ComfyUI knows a narrow encoder."""
    server = copied(
        tmp_path, LLAMA, WIDE, "\n    ".join(f"{name}: int = {size}" for name, size in SIZES.items()) + "\n"
    )
    wide, narrow = VISION.format(1152, 4304, 27, 8, 16, 24), VISION.format(128, 64, 4, 1, 2, 3)
    edit(
        tmp_path / "ComfyUI",
        "comfy/text_encoders/qwen3vl.py",
        f'"qwen3vl_32b": dict({wide})',
        f'"qwen3vl_32b": dict({narrow})',
    )
    with server:
        save_families(server, "minimax")
        (server.base_dir / "models" / "text_encoders").mkdir(exist_ok=True)
        save_small_h3_encoder(server.base_dir / "models" / "text_encoders" / "h3.safetensors")
        graph = sound_graph("minimax", steps=2)
        graph["clip"] = node("CLIPLoader", clip_name="h3.safetensors", type="minimax")
        for side, text in (("positive", "a fox jumps over a dog"), ("negative", "blurry")):
            graph[side] = node("CLIPTextEncode", clip=["clip", 0], text=text)
        expected = both(server, graph)[:2]
        divided = spread(graph, devices="cpu:3", cfg=1, ulysses=3)
        divided["clip"] = node("LoadParallelCLIP", **graph["clip"]["inputs"], plan=["plan", 0])
        assert_same(server, divided, expected)
