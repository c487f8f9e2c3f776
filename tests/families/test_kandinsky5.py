"""Kandinsky 5 for videos and pictures through a real ComfyUI against its own loader: each split, a LoRA, a first frame."""

from __future__ import annotations

from typing import ClassVar

from tests.support.graphs.comfyui_inputs import MATTERS
from tests.support.graphs.family_tests import Families, FamiliesGiven, Given
from tests.support.tiny.models import draw

LAYERS = (
    "visual_transformer_blocks.0.self_attention.to_query",
    "visual_transformer_blocks.1.cross_attention.to_value",
    "text_transformer_blocks.0.feed_forward.out_layer",
    "visual_embeddings.in_layer",
)


class TestImages(Families):
    """Pictures at the width that ComfyUI assumes, in fp8."""

    layers: ClassVar = {"kandinsky_image": LAYERS}
    matters = MATTERS


class TestVideos(FamiliesGiven):
    layers: ClassVar = {"kandinsky": LAYERS}
    given: ClassVar = {
        "kandinsky, first frame": Given("kandinsky", {"time_dim_replace": draw(1, 16, 1, 8, 10, seed=28)})
    }
