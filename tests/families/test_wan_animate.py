"""Wan Animate through a real ComfyUI against its own loader: each split, a LoRA, a pose."""

from __future__ import annotations

from typing import ClassVar

from tests.support.graphs.family_tests import FamiliesGiven, Given
from tests.support.graphs.videos import FIRST, SEEN
from tests.support.tiny.families.wan import LAYERS
from tests.support.tiny.models import draw

POSE = {"pose_video_latent": draw(1, 16, 2, 8, 10, seed=26)}


class TestVideos(FamiliesGiven):
    layers: ClassVar = {"animate": LAYERS}
    given: ClassVar = {
        "animate, pose": Given("animate", POSE | SEEN | FIRST),
    }
