"""A latent that a model concatenates with the noisy latent must have the same height. ComfyUI's own message names no node."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as redeclare

from parallel_backend.errors import Refused
from parallel_backend.models.comfyui.comfy_family import ComfyFamily
from parallel_backend.weights.files.checkpoint import read_header
from tests.support.tiny.comfyui import TINY, save_tiny
from tests.support.tiny.models import draw


def test_a_picture_to_edit_of_another_height_is_refused_with_both_heights(tmp_path: Path) -> None:
    family = ComfyFamily()
    config: Any = family.inspect(read_header(save_tiny(tmp_path, "longcat")))[1]
    config = replace(config, declaration=redeclare(config.declaration, concatenated_latent="image_cond"))
    given = {"context": draw(1, 5, TINY["longcat"].text, seed=1)}
    latent = draw(1, 16, 9, 14, seed=2)
    family.check(config, latent, given | {"image_cond": draw(1, 16, 9, 11, seed=3)}, {})
    with pytest.raises(
        Refused, match="the picture to edit is a latent 8 high and the latent to sample is 9 high: use "
    ):
        family.check(config, latent, given | {"image_cond": draw(1, 16, 8, 14, seed=3)}, {})
