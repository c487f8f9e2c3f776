"""Buffers that no file contains have the values that ComfyUI's class computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from parallel_backend.models.comfyui.comfy_family import ComfyFamily
from parallel_backend.models.comfyui.small import Builder
from parallel_backend.models.comfyui.small.case import HEADS
from parallel_backend.models.family import Stage
from parallel_backend.weights.files.checkpoint import read_header
from tests.support.tiny.models import randomise

# isort: split
from comfy.ldm.cosmos.predict2 import MiniTrainDIT
from comfy.ldm.kandinsky5.model import Kandinsky5


def kandinsky() -> Kandinsky5:
    return Kandinsky5(
        time_dim=64, model_dim=HEADS * 64, ff_dim=256, num_text_blocks=1, num_visual_blocks=2, **Builder().settings
    )


def cosmos() -> MiniTrainDIT:
    """Return a model as ComfyUI detects one of an unknown width."""
    return MiniTrainDIT(
        max_img_h=240, max_img_w=240, max_frames=128, in_channels=16, out_channels=16, patch_spatial=2, patch_temporal=1,
        model_channels=16 * 16, num_blocks=10, num_heads=16, crossattn_emb_channels=1024, pos_emb_cls="rope3d",
        pos_emb_learnable=True, use_adaln_lora=True, adaln_lora_dim=256, **Builder().settings,
    )  # fmt: skip


@pytest.mark.parametrize("make", [kandinsky, cosmos])
def test_built_models_have_the_buffers_of_comfyuis_class(make: type[torch.nn.Module], tmp_path: Path) -> None:
    model = randomise(make(), seed=1)
    save_file(dict(model.named_parameters()), tmp_path / "model.safetensors")
    family = ComfyFamily()
    _, config = family.inspect(read_header(tmp_path / "model.safetensors"))
    built = family.build(config, Stage(0, 1, 2)).module
    expected = dict(model.named_buffers())
    assert expected
    for name, buffer in expected.items():
        torch.testing.assert_close(built.get_buffer(name), buffer, rtol=0, atol=0)
