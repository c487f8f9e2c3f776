"""Wan Fun Control through a real ComfyUI against its own loader: each split, a LoRA, a control video."""

from __future__ import annotations

from typing import ClassVar

from tests.support.graphs.family_tests import FamiliesGiven, Given
from tests.support.graphs.videos import SEEN
from tests.support.tiny.families.wan import LAYERS
from tests.support.tiny.models import draw


class TestVideos(FamiliesGiven):
    layers: ClassVar = {"fun_control": LAYERS}
    given: ClassVar = {
        "wan fun, control": Given("fun_control", {"concat_latent_image": draw(1, 32, 3, 8, 10, seed=30)} | SEEN),
    }
