"""ERNIE-Image, small in a ComfyUI that reads sizes from files: each split, a LoRA."""

from __future__ import annotations

from typing import ClassVar

from tests.support.graphs.family_tests import Families, Sized


class TestSized(Sized, Families):
    layers: ClassVar = {
        "ernie": ("layers.0.self_attention.to_q", "layers.2.mlp.linear_fc2", "adaLN_modulation.1", "final_linear"),
    }
