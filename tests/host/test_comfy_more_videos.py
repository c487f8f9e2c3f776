"""HunyuanVideo, Cosmos-Predict2, Kandinsky 5 and models over Wan's blocks, through a real ComfyUI against its loader."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from scripts.comfyui import ComfyUI
from tests.host.more_families import Families, Given, Layers, save_with_loras
from tests.selection import thorough
from tests.tiny_models import draw

pytestmark = thorough

HUNYUAN = (
    "double_blocks.0.img_attn.qkv",
    "double_blocks.1.txt_mlp.2",
    "single_blocks.0.linear1",
    "txt_in.individual_token_refiner.blocks.0.self_attn.qkv",
    "final_layer.linear",
)
WAN = ("blocks.0.self_attn.q", "blocks.1.cross_attn.v", "blocks.1.ffn.2", "time_projection.1", "head.head")
COSMOS = ("blocks.0.self_attn.q_proj", "blocks.9.mlp.layer2", "blocks.4.adaln_modulation_mlp.2", "final_layer.linear")
LAYERS: Layers = {
    **dict.fromkeys(("hunyuan", "hunyuan_i2v", "skyreels"), HUNYUAN),
    **dict.fromkeys(("cosmos", "cosmos_i2v"), COSMOS),
    "kandinsky": (
        "visual_transformer_blocks.0.self_attention.to_query",
        "visual_transformer_blocks.1.cross_attention.to_value",
        "text_transformer_blocks.0.feed_forward.out_layer",
        "visual_embeddings.in_layer",
    ),
    **dict.fromkeys(("camera", "camera22", "humo", "humo_17b", "animate", "flow_rvs", "scail2", "fun_control"), WAN),
}

PICTURE = {"concat_latent_image": draw(1, 16, 3, 8, 10, seed=22)}
FIRST = PICTURE | {"concat_mask": (torch.arange(3) > 0).float().view(1, 1, 3, 1, 1).expand(1, 1, 3, 8, 10).contiguous()}
SEEN = {"clip_vision_output": draw(1, 5, 1280, seed=21)}
CAMERA = {"camera_conditions": draw(1, 24, 3, 64, 80, seed=23)}
PERSON = ((16, 1, 8, 10),)
POSE = {"pose_video_latent": draw(1, 16, 2, 8, 10, seed=26)}
PERSONS = {
    "pose_video_latent": draw(1, 16, 3, 4, 5, seed=27),
    "driving_mask_28ch": draw(1, 3, 28, 4, 5, seed=29).gt(0).float(),
    "ref_mask_28ch": (draw(1, 4, 28, 8, 10, seed=32).gt(0) & (torch.arange(4) < 1).view(1, 4, 1, 1, 1)).float(),
}

GIVEN: Mapping[str, Given] = {
    "hunyuan, first frame": Given("hunyuan", {"guiding_frame_index": torch.tensor(0.0)}, mask=True),
    "hunyuan, reference": Given("hunyuan", {"ref_latent": draw(1, 16, 1, 8, 10, seed=24)}),
    "hunyuan i2v, first frame": Given("hunyuan_i2v", FIRST),
    "skyreels, first frame": Given("skyreels", PICTURE),
    "cosmos-predict2 i2v, first frame": Given("cosmos_i2v", mask=True),
    "kandinsky, first frame": Given("kandinsky", {"time_dim_replace": draw(1, 16, 1, 8, 10, seed=28)}),
    "wan 2.1, camera": Given("camera", CAMERA | SEEN | PICTURE),
    "wan 2.2, camera": Given("camera22", CAMERA | FIRST),
    "humo, person": Given("humo", references=PERSON),
    "humo 17b, person": Given("humo_17b", references=PERSON),
    "scail 2, persons": Given("scail2", PERSONS | SEEN, references=PERSON),
    "wan fun, control": Given("fun_control", {"concat_latent_image": draw(1, 32, 3, 8, 10, seed=30)} | SEEN),
    "animate, pose": Given("animate", POSE | SEEN | FIRST),
}


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_with_loras(comfyui, LAYERS)


class TestVideos(Families):
    layers = LAYERS
    given = GIVEN
