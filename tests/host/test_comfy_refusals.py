"""What Load Parallel Diffusion Model's models cannot do is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from scripts.comfyui import ComfyUI
from tests.host.comfy_graphs import graph_of, save_families, spread
from tests.host.graphs import Graph, insert_after_model, node
from tests.host.test_families import refused
from tests.selection import thorough


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_families(comfyui, "flux2", "wan")


UNDECLARED = "ACEStep"
"""A class that has no declaration."""


def undeclared(server: ComfyUI) -> Graph:
    """With a file that ComfyUI takes for one of it, and that is not complete."""
    save_file(
        {"genre_embedder.weight": torch.zeros(1, 1)}, server.base_dir / "models/diffusion_models/undeclared.safetensors"
    )
    graph = graph_of("wan")
    graph["model"]["inputs"]["unet_name"] = "undeclared.safetensors"
    return spread(graph)


def test_an_incomplete_model_without_a_declaration_is_refused_by_name(comfyui: ComfyUI) -> None:
    assert f"choose a complete {UNDECLARED} file." in refused(comfyui, undeclared(comfyui))


def test_text_of_another_encoder_is_refused(comfyui: ComfyUI) -> None:
    graph = graph_of("wan")
    graph["positive"]["inputs"]["conditioning"] = "flux2-positive.safetensors"
    assert "takes [batch, tokens, 4096]" in refused(comfyui, spread(graph))


def test_a_loader_of_one_family_refuses_the_others(comfyui: ComfyUI) -> None:
    graph = spread(graph_of("wan"))
    graph["model"]["class_type"] = "LoadParallelFlux"
    assert refused(comfyui, graph) == (
        "wan.safetensors is a WAN21_T2V model and this loader takes Flux, Flux2, FluxInpaint, FluxSchnell: use Load Parallel "
        "Diffusion Model."
    )


PICTURE = {
    "vae": node("VAELoader", vae_name="taef1"),
    "image": node("EmptyImage", width=64, height=64, batch_size=1, color=0x4080C0),
    "objects": node("PackObjects"),
    "uni3c": node("PackUni3C", width=384),
}
CONTROL_PATCH = {"model_patch": ["objects", 4], "vae": ["vae", 0], "image": ["image", 0], "strength": 1.0}

FROM_WITHIN: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "FluxKVCache": ("flux2", {}, "Replacing diffusion_model.params.default_ref_method cannot be done with"),
    "QwenImageDiffsynthControlnet": (
        "flux2",
        CONTROL_PATCH,
        "attention and block patches (double_block) cannot be applied to",
    ),
    "ZImageFunControlnet": ("flux2", CONTROL_PATCH, "attention and block patches (double_block) cannot be applied to"),
    "USOStyleReference": (
        "flux2",
        {"model_patch": ["objects", 4], "clip_vision_output": ["objects", 1]},
        "attention and block patches (post_input) cannot be applied to",
    ),
    "WanUni3CControlnetApply": (
        "wan",
        {"model_patch": ["uni3c", 0], "vae": ["vae", 0], "render_video": ["image", 0]}
        | {"strength": 1.0, "start_percent": 0.0, "end_percent": 1.0},
        "attention and block patches (double_block) cannot be applied to",
    ),
    "SUPIRApply": (
        "flux2",
        {"model_patch": ["objects", 4], "vae": ["vae", 0], "image": ["image", 0]}
        | {"strength_start": 1.0, "strength_end": 1.0, "restore_cfg": 4.0, "restore_cfg_s_tmin": 0.05},
        "attention and block patches (middle_block_after_patch, output_block_patch, forward_timestep_embed_patch) cannot be "
        "applied to",
    ),
}
"""The node, on which model, its inputs, and what the refusal begins with."""


QUICK = ("FluxKVCache", "QwenImageDiffsynthControlnet", "ZImageFunControlnet")


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[thorough] * (kind not in QUICK)) for kind in FROM_WITHIN])
def test_what_changes_the_model_from_within_is_refused_by_name(comfyui: ComfyUI, kind: str) -> None:
    name, inputs, said = FROM_WITHIN[kind]
    graph = insert_after_model(graph_of(name) | PICTURE, kind, **inputs)
    assert refused(comfyui, spread(graph, strict=False)) == (
        f"{said} a parallel MODEL: the weights live in the workers; remove that node, or use Load Diffusion Model."
    )
