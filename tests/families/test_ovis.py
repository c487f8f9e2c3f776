"""Ovis through a real ComfyUI against its own loader: each split, a LoRA."""

from __future__ import annotations

from typing import ClassVar

from tests.support.graphs.comfyui_inputs import MATTERS
from tests.support.graphs.family_tests import Families


class TestImages(Families):
    layers: ClassVar = {
        "ovis": ("double_blocks.0.img_attn.qkv", "double_blocks.1.txt_mlp.gate_proj", "single_blocks.0.linear1"),
    }
    matters = MATTERS
