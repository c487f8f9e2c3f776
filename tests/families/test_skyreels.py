"""SkyReels through a real ComfyUI against its own loader: each split, a LoRA, its first frame."""

from __future__ import annotations

from typing import ClassVar

from tests.support.graphs.family_tests import FamiliesGiven, Given
from tests.support.graphs.videos import PICTURE
from tests.support.tiny.families.hunyuan import LAYERS


class TestVideos(FamiliesGiven):
    layers: ClassVar = {"skyreels": LAYERS}
    given: ClassVar = {
        "skyreels, first frame": Given("skyreels", PICTURE),
    }
