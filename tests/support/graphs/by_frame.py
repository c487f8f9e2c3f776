"""What videos are given beside their text."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from tests.support.tiny.models import draw

GIVEN: Mapping[str, Mapping[str, Tensor]] = {
    "scail": {"pose_video_latent": draw(1, 16, 3, 4, 5, seed=41), "clip_vision_output": draw(1, 5, 1280, seed=42)},
    "s2v": {"audio_embed": draw(1, 25, 1024, 12, seed=43), "control_video": draw(1, 16, 3, 8, 10, seed=44)},
    "dancer": {"audio_embed": draw(1, 20, 35, seed=45), "clip_vision_output": draw(1, 5, 1280, seed=46)},
}
