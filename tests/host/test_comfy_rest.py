"""Families of ComfyUI's that no other file of this folder has: plans, LoRA and references, against the stock loader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.comfyui import ComfyUI
from tests.host.comfy_graphs import TOKENS, TOLERANCE, LatentOf, graph_of, save_latent, spread, with_reference
from tests.host.conftest import relative_error
from tests.host.graphs import Graph, node
from tests.host.test_comfy_files import save_lora, with_lora
from tests.host.test_comfy_wide import MATTERS
from tests.selection import thorough
from tests.tiny_comfy import WIDE, save_tiny, save_wide
from tests.tiny_models import draw

pytestmark = thorough

OF_16 = node("EmptySD3LatentImage", width=112, height=72, batch_size=1)
OF_128 = node("EmptyFlux2LatentImage", width=112, height=80, batch_size=1)


@dataclass(frozen=True)
class Kind:
    """A family's empty latent, the width of its text and some layers that a LoRA changes.

    `references` are the shapes of the latents to edit. A `masked` family's text encoder gives a mask; what is not `looped`
    runs one model call at a time.
    """

    latent: dict[str, Any]
    text: int
    layers: tuple[str, ...]
    references: tuple[tuple[int, ...], ...] = ()
    masked: bool = False
    looped: bool = True


KINDS: Mapping[str, Kind] = {
    "flow_rvs": Kind(
        node("LoadLatent", latent="flow_rvs.latent"), 4096, ("blocks.0.self_attn.q", "blocks.2.ffn.2", "head.head"),
        looped=False,
    ),
    "ovis": Kind(
        OF_16, 2048, ("double_blocks.0.img_attn.qkv", "double_blocks.1.txt_mlp.gate_proj", "single_blocks.0.linear1")
    ),
    "lens": Kind(
        OF_128,
        11520,
        ("transformer_blocks.0.attn.img_qkv", "transformer_blocks.1.txt_mlp.w1", "txt_in"),
        masked=True,
    ),
    "joyimage": Kind(
        node("EmptyHunyuanLatentVideo", width=112, height=72, length=1, batch_size=1),
        4096,
        ("double_blocks.0.attn.img_attn_qkv", "double_blocks.1.attn.txt_attn_proj", "proj_out"),
        references=((16, 1, 6, 5), (16, 1, 3, 4)),
    ),
    "wide_auraflow": Kind(
        node("EmptyLatentImage", width=112, height=72, batch_size=1),
        2048,
        ("double_layers.0.attn.w1q", "single_layers.0.mlp.c_fc1", "cond_seq_linear"),
    ),
    "wide_boogu": Kind(
        OF_16,
        4096,
        (
            "double_stream_layers.0.img_instruct_attn.processor.img_to_q",
            "single_stream_layers.0.attn.to_k",
            "noise_refiner.0.feed_forward.linear_1",
        ),
        references=((16, 6, 5),),
        masked=True,
    ),
    "wide_ideogram": Kind(OF_128, 53248, ("layers.0.attention.qkv", "layers.1.feed_forward.w2", "input_proj")),
    "wide_mage_flow": Kind(
        OF_128,
        2560,
        ("transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.add_k_proj", "img_in"),
        references=((128, 3, 5), (128, 2, 2)),
    ),
}  # fmt: skip

PLANS: Mapping[str, dict[str, Any]] = {
    "ulysses 2": {"devices": "cpu:2", "cfg": 1, "ulysses": 2},
    "ring 3": {"devices": "cpu:3", "cfg": 1, "ring": 3},
    "ulysses 2 x ring 2": {"devices": "cpu:4", "cfg": 1, "ulysses": 2, "ring": 2},
    "cfg 2": {"devices": "cpu:2", "cfg": 2},
    "pp 2": {"devices": "cpu:2", "cfg": 1, "pipefusion": 2, "warmup_steps": 99},
    "sharded": {"devices": "cpu:2", "cfg": 1, "ring": 2, "weights": "sharded"},
}


@pytest.fixture(scope="module", params=KINDS)
def name(request: pytest.FixtureRequest, comfyui: ComfyUI) -> Iterator[str]:
    """A family, whose file is there for its tests: some take a gigabyte."""
    name: str = request.param
    kind = KINDS[name]
    models = comfyui.base_dir / "models"
    path = (save_wide if name in WIDE else save_tiny)(models / "diffusion_models", name)
    for side, tokens in TOKENS.items():
        prompt = {"cond": draw(1, tokens, kind.text, seed=tokens)}
        if kind.masked:
            prompt["attention_mask"] = torch.ones(1, tokens, dtype=torch.int64)
        save_file(prompt, comfyui.input_dir / f"{name}-{side}.safetensors")
    for number, shape in enumerate(kind.references):
        save_latent(comfyui, f"{name}-{number}", 1, *shape)
    save_latent(comfyui, "flow_rvs", 1, 16, 3, 8, 10)
    layers = tuple(f"diffusion_model.{layer}" for layer in kind.layers)
    save_lora(models / "loras" / f"{name}-lora.safetensors", layers, load_file(path))
    yield name
    path.unlink()


def job(name: str) -> Graph:
    """Both sides, in two steps; the wide ones take one, as all their weights are cast in each call."""
    graph = graph_of("wan", steps=1 if name in WIDE else 2)
    graph["model"]["inputs"]["unet_name"] = f"{name}.safetensors"
    for side in TOKENS:
        graph[side]["inputs"]["conditioning"] = f"{name}-{side}.safetensors"
    return graph | {"latent": KINDS[name].latent}


def check(name: str, graph: Graph, plan: str, latent_of: LatentOf) -> None:
    """The result on workers is the stock loader's."""
    found = latent_of(spread(graph, strict=KINDS[name].looped, **PLANS[plan]))
    assert relative_error(found, latent_of(graph)) <= TOLERANCE


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_gives_the_stock_result(name: str, plan: str, latent_of: LatentOf) -> None:
    check(name, job(name), plan, latent_of)


def test_lora(name: str, latent_of: LatentOf) -> None:
    graph = with_lora(job(name), name, 0.8)
    assert relative_error(latent_of(job(name)), latent_of(graph)) > MATTERS
    check(name, graph, "sharded", latent_of)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.references], indirect=True)
def test_references(name: str, latent_of: LatentOf) -> None:
    """The pictures to edit, for one of the sides."""
    graph = job(name)
    for number in range(len(KINDS[name].references)):
        graph = with_reference(graph, f"{name}-{number}")
    assert relative_error(latent_of(job(name)), latent_of(graph)) > MATTERS
    check(name, graph, "ring 3", latent_of)
