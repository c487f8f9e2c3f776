"""Boogu, small in a ComfyUI that reads sizes from files: each split, a LoRA, a reference."""

from __future__ import annotations

from typing import ClassVar

from tests.support.graphs.family_tests import FamiliesGiven, Given, Sized


class TestSized(Sized, FamiliesGiven):
    layers: ClassVar = {
        "boogu": (
            "double_stream_layers.0.img_instruct_attn.processor.img_to_q",
            "single_stream_layers.0.attn.to_k",
            "noise_refiner.0.feed_forward.linear_1",
        ),
    }
    given: ClassVar = {
        "boogu, a reference": Given("boogu", references=((16, 6, 5),), sides=("positive",)),
    }
