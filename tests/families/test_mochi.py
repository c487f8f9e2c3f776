"""Mochi, small in a ComfyUI that reads sizes from files: each split, a LoRA."""

from __future__ import annotations

from typing import ClassVar

from tests.support.graphs.family_tests import Families, Sized


class TestSized(Sized, Families):
    layers: ClassVar = {
        "mochi": ("blocks.0.attn.qkv_x", "blocks.1.mlp_x.w1", "blocks.2.attn.proj_x", "t5_yproj", "final_layer.linear"),
    }
