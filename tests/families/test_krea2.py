"""Krea 2 through a real ComfyUI against its own loader: each split, a LoRA, references."""

from __future__ import annotations

from typing import ClassVar

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import LatentOf
from tests.support.graphs.comfyui_inputs import MATTERS, graph_with
from tests.support.graphs.family_checks import assert_stock
from tests.support.graphs.family_tests import FamiliesGiven, Given

REFERENCES = ((16, 1, 6, 5), (16, 1, 3, 4))


class TestImages(FamiliesGiven):
    layers: ClassVar = {
        "krea2": (
            "blocks.0.attn.wq",
            "blocks.1.attn.wk",
            "blocks.2.mlp.down",
            "txtfusion.refiner_blocks.0.attn.wv",
            "tproj.1",
            "last.linear",
        ),
    }
    given: ClassVar = {
        "krea 2, references": Given("krea2", references=REFERENCES, method="index"),
        "krea 2, references without noise": Given(
            "krea2", references=REFERENCES, method="index_timestep_zero", sides=("positive",)
        ),
    }
    matters = MATTERS


def test_a_declared_model_gives_the_stock_result(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    assert_stock(latent_of, graph_with(comfyui, "krea2"))
