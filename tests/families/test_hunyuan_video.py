"""HunyuanVideo through a real ComfyUI against its own loader: each split, a LoRA, a first frame, a reference; its VAE, small."""

from __future__ import annotations

from typing import ClassVar

import torch

from tests.support.graphs.family_tests import FamiliesGiven, Given
from tests.support.graphs.sized_vaes import SizedVAE
from tests.support.graphs.videos import FIRST
from tests.support.tiny.families.hunyuan import LAYERS
from tests.support.tiny.models import draw


class TestVideos(FamiliesGiven):
    layers: ClassVar = {"hunyuan": LAYERS, "hunyuan_i2v": LAYERS}
    given: ClassVar = {
        "hunyuan, first frame": Given("hunyuan", {"guiding_frame_index": torch.tensor(0.0)}, mask=True),
        "hunyuan, reference": Given("hunyuan", {"ref_latent": draw(1, 16, 1, 8, 10, seed=24)}),
        "hunyuan i2v, first frame": Given("hunyuan_i2v", FIRST),
    }


class TestSized(SizedVAE):
    vae = "hunyuan"
