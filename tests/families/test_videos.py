"""Models for videos and models over Wan's blocks, through a real ComfyUI against its loader."""

from __future__ import annotations

import pytest

from scripts.comfyui import ComfyUI
from tests.support.graphs.family_tests import Families, Layers, save_with_loras
from tests.support.graphs.videos import GIVEN
from tests.support.selection import thorough

pytestmark = thorough

HUNYUAN = (
    "double_blocks.0.img_attn.qkv",
    "double_blocks.1.txt_mlp.2",
    "single_blocks.0.linear1",
    "txt_in.individual_token_refiner.blocks.0.self_attn.qkv",
    "final_layer.linear",
)
HUNYUAN15 = tuple(name for name in HUNYUAN if not name.startswith("single"))
WAN = ("blocks.0.self_attn.q", "blocks.1.cross_attn.v", "blocks.1.ffn.2", "time_projection.1", "head.head")
COSMOS = ("blocks.0.self_attn.q_proj", "blocks.9.mlp.layer2", "blocks.4.adaln_modulation_mlp.2", "final_layer.linear")
LAYERS: Layers = {
    "ltxv": (
        "transformer_blocks.0.attn1.to_q",
        "transformer_blocks.1.attn2.to_v",
        "transformer_blocks.1.ff.net.2",
        "caption_projection.linear_1",
        "proj_out",
    ),
    "hunyuan15": HUNYUAN15,
    "meanflow": (*HUNYUAN15, "time_r_in.in_layer"),
    **dict.fromkeys(("hunyuan", "hunyuan_i2v", "skyreels"), HUNYUAN),
    **dict.fromkeys(("cosmos", "cosmos_i2v"), COSMOS),
    "kandinsky": (
        "visual_transformer_blocks.0.self_attention.to_query",
        "visual_transformer_blocks.1.cross_attention.to_value",
        "text_transformer_blocks.0.feed_forward.out_layer",
        "visual_embeddings.in_layer",
    ),
    **dict.fromkeys(("camera", "camera22", "humo", "humo_17b", "animate", "flow_rvs", "scail2", "fun_control"), WAN),
    **dict.fromkeys(("scail", "s2v", "dancer"), WAN),
}


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_with_loras(comfyui, LAYERS)


class TestVideos(Families):
    layers = LAYERS
    given = GIVEN
