"""Lens through a real ComfyUI against its own loader: each split, a LoRA."""

from __future__ import annotations

from typing import ClassVar

from tests.support.graphs.comfyui_inputs import MATTERS
from tests.support.graphs.family_tests import Families


class TestImages(Families):
    layers: ClassVar = {
        "lens": ("transformer_blocks.0.attn.img_qkv", "transformer_blocks.1.txt_mlp.w1", "txt_in"),
    }
    matters = MATTERS
