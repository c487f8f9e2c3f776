"""Cosmos Predict2 through a real ComfyUI against its own loader: each split, a LoRA, a first frame."""

from __future__ import annotations

from typing import ClassVar

from tests.support.graphs.family_tests import FamiliesGiven, Given

LAYERS = ("blocks.0.self_attn.q_proj", "blocks.9.mlp.layer2", "blocks.4.adaln_modulation_mlp.2", "final_layer.linear")


class TestVideos(FamiliesGiven):
    layers: ClassVar = {"cosmos": LAYERS, "cosmos_i2v": LAYERS}
    given: ClassVar = {"cosmos-predict2 i2v, first frame": Given("cosmos_i2v", mask=True)}
