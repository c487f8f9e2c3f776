"""Inputs and nodes that Load Parallel Diffusion Model's models do not support are refused by name."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from scripts.comfyui import ComfyUI
from tests.refusals.of_comfyui import FROM_WITHIN, PICTURE
from tests.support.graphs.comfyui import graph_of, save_families, spread
from tests.support.graphs.diffusers import refused
from tests.support.graphs.flux import Graph, insert_after_model
from tests.support.selection import thorough


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_families(comfyui, "flux2", "wan")


UNDECLARED = "ACEStep"
"""A class that has no declaration."""


def undeclared(server: ComfyUI) -> Graph:
    """Return a graph with an incomplete file that ComfyUI recognises as the undeclared class."""
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


def test_a_loader_of_one_family_refuses_other_families(comfyui: ComfyUI) -> None:
    graph = spread(graph_of("wan"))
    graph["model"]["class_type"] = "LoadParallelFlux"
    assert refused(comfyui, graph) == (
        "wan.safetensors is a WAN21_T2V model and this loader takes Flux, Flux2, FluxInpaint, FluxSchnell: use Load Parallel "
        "Diffusion Model."
    )


QUICK = ("FluxKVCache", "QwenImageDiffsynthControlnet", "ZImageFunControlnet")


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[thorough] * (kind not in QUICK)) for kind in FROM_WITHIN])
def test_nodes_that_change_the_inside_of_the_model_are_refused_by_name(comfyui: ComfyUI, kind: str) -> None:
    name, inputs, said = FROM_WITHIN[kind]
    graph = insert_after_model(graph_of(name) | PICTURE, kind, **inputs)
    assert refused(comfyui, spread(graph, strict=False)) == (
        f"{said} a parallel MODEL: the weights live in the workers; remove that node, or use Load Diffusion Model."
    )
