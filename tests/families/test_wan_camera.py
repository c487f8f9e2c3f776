"""Wan's cameras through a real ComfyUI against its own loader: each split, a LoRA, a camera's path."""

from __future__ import annotations

from typing import ClassVar

from tests.support.graphs.family_tests import FamiliesGiven, Given
from tests.support.graphs.videos import FIRST, PICTURE, SEEN
from tests.support.tiny.families.wan import LAYERS
from tests.support.tiny.models import draw

CAMERA = {"camera_conditions": draw(1, 24, 3, 64, 80, seed=23)}


class TestVideos(FamiliesGiven):
    layers: ClassVar = {"camera": LAYERS, "camera22": LAYERS}
    given: ClassVar = {
        "wan 2.1, camera": Given("camera", CAMERA | SEEN | PICTURE),
        "wan 2.2, camera": Given("camera22", CAMERA | FIRST),
    }
