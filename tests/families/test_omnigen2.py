"""OmniGen 2, small in a ComfyUI that reads sizes from files: each split, a LoRA, references."""

from __future__ import annotations

from typing import ClassVar

from tests.support.graphs.family_tests import FamiliesGiven, Given, Sized


class TestSized(Sized, FamiliesGiven):
    layers: ClassVar = {
        "omnigen2": (
            "layers.0.attn.to_q",
            "layers.1.feed_forward.linear_2",
            "noise_refiner.0.attn.to_k",
            "ref_image_refiner.1.feed_forward.linear_1",
            "context_refiner.0.attn.to_out.0",
            "norm_out.linear_2",
        ),
    }
    given: ClassVar = {
        "omnigen 2, references": Given("omnigen2", references=((16, 6, 5), (16, 3, 4))),
    }
