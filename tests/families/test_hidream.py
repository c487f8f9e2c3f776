"""HiDream, small in a ComfyUI that reads sizes from files: each split, a LoRA, a picture to edit."""

from __future__ import annotations

from typing import ClassVar

from tests.support.graphs.family_tests import FamiliesGiven, Given, Sized
from tests.support.tiny.models import draw


class TestSized(Sized, FamiliesGiven):
    layers: ClassVar = {
        "hidream": (
            "double_stream_blocks.0.block.attn1.to_q",
            "double_stream_blocks.1.block.ff_t.w2",
            "single_stream_blocks.0.block.ff_i.shared_experts.w1",
            "caption_projection.0.linear",
            "final_layer.linear",
        ),
    }
    given: ClassVar = {
        "hidream, a picture to edit": Given("hidream", {"concat_latent_image": draw(1, 16, 10, 14, seed=51)}),
    }
