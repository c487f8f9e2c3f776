"""Anima through a real ComfyUI against its own loader: each split, a LoRA."""

from __future__ import annotations

from typing import ClassVar

from tests.support.graphs.comfyui_inputs import MATTERS
from tests.support.graphs.family_tests import Families


class TestImages(Families):
    layers: ClassVar = {
        "anima": (
            "blocks.0.self_attn.q_proj",
            "blocks.9.mlp.layer2",
            "blocks.4.adaln_modulation_mlp.2",
            "llm_adapter.blocks.0.cross_attn.k_proj",
            "final_layer.linear",
        ),
    }
    matters = MATTERS
