"""HunyuanVideo 1.5 and its super-resolution through a real ComfyUI against its own loader."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import LatentOf, graph_of, save_families
from tests.support.graphs.family_checks import assert_stock
from tests.support.graphs.family_tests import Families, Given
from tests.support.graphs.flux import step_by_step
from tests.support.selection import thorough
from tests.support.tiny.families.hunyuan import LAYERS
from tests.support.tiny.models import draw

WITHOUT_SINGLE_BLOCKS = tuple(name for name in LAYERS if not name.startswith("single"))
PICTURE = {"concat_latent_image": draw(1, 32, 3, 4, 5, seed=33)}
FIRST = PICTURE | {"concat_mask": (torch.arange(3) > 0).float().view(1, 1, 3, 1, 1).expand(1, 1, 3, 4, 5).contiguous()}
SHOWN = {"clip_vision_output": draw(1, 5, 1152, seed=34)}
GLYPHS = {"conditioning_byt5small": draw(1, 3, 1472, seed=35)}
MASKED = Given(  # ComfyUI's own model supports the mask only without further inputs
    "hunyuan15", {"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0]])}, sides=("positive",)
)


class TestVideos(Families):
    layers: ClassVar = {"hunyuan15": WITHOUT_SINGLE_BLOCKS, "meanflow": (*WITHOUT_SINGLE_BLOCKS, "time_r_in.in_layer")}
    given: ClassVar = {
        "hunyuan 1.5, masked text": MASKED,
        "hunyuan 1.5, first frame": Given("hunyuan15", FIRST | SHOWN),
        "hunyuan 1.5, words in quotation marks": Given("hunyuan15", GLYPHS),
        "hunyuan 1.5 super-resolution": Given(
            "meanflow",
            {"concat_latent_image": draw(1, 66, 3, 4, 5, seed=36), "noise_augmentation": torch.tensor(0.3)}
            | SHOWN
            | GLYPHS,
        ),
    }


@thorough  # in the quick run models/test_sequence_parallel has masked text in patches, and the next test stages
@pytest.mark.parametrize("plan", [{"devices": "cpu:2"}, {"devices": "cpu:2", "pipefusion": 2, "warmup_steps": 99}])
def test_masked_text_gives_the_stock_result(plan: dict[str, Any], comfyui: ComfyUI, latent_of: LatentOf) -> None:
    """The text has a mask; the model has no single blocks."""
    save_families(comfyui, "hunyuan15")
    assert_stock(latent_of, MASKED.graph(comfyui), **plan)


def test_meanflow_gives_the_stock_latent_in_the_loop(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    """Super-resolution reads the next step's sigma."""
    save_families(comfyui, "meanflow")
    assert_stock(latent_of, graph_of("meanflow"), pipefusion=2, warmup_steps=99)


@thorough  # in the quick run the loop; ComfyUI's own loop gives the sigmas to each call
def test_meanflow_one_model_call_at_a_time_gives_the_stock_latent(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    save_families(comfyui, "meanflow")
    assert_stock(latent_of, step_by_step(graph_of("meanflow")), strict=False)
