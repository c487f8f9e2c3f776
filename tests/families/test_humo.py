"""HuMo through a real ComfyUI against its own loader: each split, a LoRA, a person."""

from __future__ import annotations

from typing import ClassVar

from tests.support.graphs.family_tests import FamiliesGiven, Given
from tests.support.graphs.videos import PERSON
from tests.support.tiny.families.wan import LAYERS


class TestVideos(FamiliesGiven):
    layers: ClassVar = {"humo": LAYERS, "humo_17b": LAYERS}
    given: ClassVar = {
        "humo, person": Given("humo", references=PERSON),
        "humo 17b, person": Given("humo_17b", references=PERSON),
    }
