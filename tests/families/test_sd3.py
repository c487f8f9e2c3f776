"""Stable Diffusion 3 through a real ComfyUI against its own loader: each split, a LoRA."""

from __future__ import annotations

from typing import ClassVar

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import TOLERANCE, LatentOf, spread
from tests.support.graphs.comfyui_inputs import MATTERS, graph_with
from tests.support.graphs.family_checks import assert_stock
from tests.support.graphs.family_tests import Families
from tests.support.graphs.flux import insert_after_model
from tests.support.latents import relative_error


class TestImages(Families):
    layers: ClassVar = {
        "sd3": (
            "joint_blocks.0.x_block.attn.qkv",
            "joint_blocks.1.x_block.attn2.proj",
            "joint_blocks.1.context_block.mlp.fc1",
            "context_embedder",
            "final_layer.linear",
        ),
    }
    matters = MATTERS


def test_a_declared_model_gives_the_stock_result(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    """The model's position embedding, which is no parameter of ComfyUI's class, is loaded too."""
    assert_stock(latent_of, graph_with(comfyui, "sd3"))


def test_easycache_has_no_effect_on_a_class_that_does_not_support_it(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    """EasyCache has no effect with the stock loader either: ComfyUI's SD 3 calls no wrappers."""
    settings = {"reuse_threshold": 3.0, "start_percent": 0.0, "end_percent": 1.0, "verbose": False}
    graph = graph_with(comfyui, "sd3")
    cached = insert_after_model(graph, "EasyCache", **settings)
    assert relative_error(latent_of(spread(cached, strict=False)), latent_of(graph)) <= TOLERANCE
