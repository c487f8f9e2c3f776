"""Families of videos through a real ComfyUI against its own loader: each split, a LoRA, and the inputs of their own nodes.

Cosmos Predict2, FlowRVS, HuMo, HunyuanVideo, Kandinsky 5, SkyReels, Wan Animate, Wan's camera models and Wan Fun Control.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from tests.support.graphs.family_tests import Families, Given
from tests.support.graphs.videos import FIRST, PERSON, PICTURE, SEEN
from tests.support.tiny.families import hunyuan, wan
from tests.support.tiny.families.images import KANDINSKY_LAYERS
from tests.support.tiny.models import draw

COSMOS = ("blocks.0.self_attn.q_proj", "blocks.9.mlp.layer2", "blocks.4.adaln_modulation_mlp.2", "final_layer.linear")
CAMERA = {"camera_conditions": draw(1, 24, 3, 64, 80, seed=23)}


class TestVideos(Families):
    layers: ClassVar = {
        **dict.fromkeys(("cosmos", "cosmos_i2v"), COSMOS),
        **dict.fromkeys(("hunyuan", "hunyuan_i2v", "skyreels"), hunyuan.LAYERS),
        "kandinsky": KANDINSKY_LAYERS,
        **dict.fromkeys(
            ("animate", "camera", "camera22", "flow_rvs", "fun_control", "humo", "humo_17b"),
            wan.LAYERS,
        ),
    }
    given: ClassVar = {
        "cosmos-predict2 i2v, first frame": Given("cosmos_i2v", mask=True),
        "hunyuan, first frame": Given("hunyuan", {"guiding_frame_index": torch.tensor(0.0)}, mask=True),
        "hunyuan, reference": Given("hunyuan", {"ref_latent": draw(1, 16, 1, 8, 10, seed=24)}),
        "hunyuan i2v, first frame": Given("hunyuan_i2v", FIRST),
        "skyreels, first frame": Given("skyreels", PICTURE),
        "kandinsky, first frame": Given("kandinsky", {"time_dim_replace": draw(1, 16, 1, 8, 10, seed=28)}),
        "animate, pose": Given("animate", {"pose_video_latent": draw(1, 16, 2, 8, 10, seed=26), **SEEN, **FIRST}),
        "wan 2.1, camera": Given("camera", CAMERA | SEEN | PICTURE),
        "wan 2.2, camera": Given("camera22", CAMERA | FIRST),
        "wan fun, control": Given("fun_control", {"concat_latent_image": draw(1, 32, 3, 8, 10, seed=30)} | SEEN),
        "humo, person": Given("humo", references=PERSON),
        "humo 17b, person": Given("humo_17b", references=PERSON),
    }
