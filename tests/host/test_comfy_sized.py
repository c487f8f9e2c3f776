"""Models that ComfyUI takes to be too large for a test, in a ComfyUI that can be told otherwise.

It is a copy of the real one whose detection also looks for sizes in a file's metadata, as ComfyUI's own does for Wan and
LTX-Video. Both loaders and the workers use that copy, of which all else is as it was. In ComfyUI's detection HiDream has 17
billion parameters, Mochi 10, ERNIE-Image 8 and OmniGen 2 four; of the others blocks may be left out, but a block has a hundred
million or more.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping

import pytest

from parallel_backend.wire.secret import VARIABLE
from scripts.comfyui import PACKS, REPO, ComfyUI
from tests.host.comfy_graphs import LatentOf
from tests.host.conftest import latents
from tests.host.more_families import Families, Given, Layers, save_with_loras
from tests.selection import thorough
from tests.tiny_models import draw

pytestmark = thorough

LAYERS: Layers = {
    "hidream": (
        "double_stream_blocks.0.block.attn1.to_q",
        "double_stream_blocks.1.block.ff_t.w2",
        "single_stream_blocks.0.block.ff_i.shared_experts.w1",
        "caption_projection.0.linear",
        "final_layer.linear",
    ),
    "lumina": (
        "layers.0.attention.qkv",
        "layers.1.feed_forward.w2",
        "context_refiner.0.attention.out",
        "final_layer.linear",
    ),
    "radiance": ("double_blocks.0.img_attn.qkv", "double_blocks.0.txt_mlp.0", "single_blocks.0.linear1"),
    "mochi": ("blocks.0.attn.qkv_x", "blocks.1.mlp_x.w1", "blocks.2.attn.proj_x", "t5_yproj", "final_layer.linear"),
    "omnigen2": (
        "layers.0.attn.to_q",
        "layers.1.feed_forward.linear_2",
        "noise_refiner.0.attn.to_k",
        "ref_image_refiner.1.feed_forward.linear_1",
        "context_refiner.0.attn.to_out.0",
        "norm_out.linear_2",
    ),
    "boogu": (
        "double_stream_layers.0.img_instruct_attn.processor.img_to_q",
        "single_stream_layers.0.attn.to_k",
        "noise_refiner.0.feed_forward.linear_1",
    ),
    "ernie": ("layers.0.self_attention.to_q", "layers.2.mlp.linear_fc2", "adaLN_modulation.1", "final_linear"),
    "auraflow": ("double_layers.0.attn.w1q", "single_layers.0.mlp.c_fc1", "cond_seq_linear"),
    "ideogram": ("layers.0.attention.qkv", "layers.1.feed_forward.w2", "input_proj"),
    "mage_flow": ("transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.add_k_proj", "img_in"),
}

GIVEN: Mapping[str, Given] = {
    "hidream, a picture to edit": Given("hidream", {"concat_latent_image": draw(1, 16, 10, 14, seed=51)}),
    "omnigen 2, references": Given("omnigen2", references=((16, 6, 5), (16, 3, 4))),
    "boogu, a reference": Given("boogu", references=((16, 6, 5),), sides=("positive",)),
    "mage-flow, references": Given("mage_flow", references=((128, 3, 5), (128, 2, 2)), sides=("positive",)),
}

SIZES = """

_taken_for_granted = model_config_from_unet


def model_config_from_unet(*args, metadata=None, **kwargs):
    found = _taken_for_granted(*args, metadata=metadata, **kwargs)
    if found is not None and "sizes" in (metadata or {}):
        found.unet_config |= json.loads(metadata["sizes"])
    return found
"""


@pytest.fixture(scope="module")
def comfyui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyUI]:
    """The copy, with the models, their prompts and their LoRAs."""
    folder = tmp_path_factory.mktemp("sized")
    copy = folder / "ComfyUI"
    left = shutil.ignore_patterns(".git", "__pycache__")
    shutil.copytree(os.environ["COMFYUI_PATH"], copy, ignore=left)
    with (copy / "comfy" / "model_detection.py").open("a") as detection:
        detection.write(SIZES)
    server = ComfyUI(
        copy,
        folder / "base",
        env={VARIABLE: str(folder / "secret")},
        packs={**PACKS, "other-pack": REPO / "tests" / "host" / "other_pack"},
    )
    save_with_loras(server, LAYERS)
    with server:
        yield server


@pytest.fixture(scope="module")
def latent_of(comfyui: ComfyUI) -> LatentOf:
    return latents(comfyui)


class TestSized(Families):
    layers = LAYERS
    given = GIVEN
    refused = (("radiance", "pipefusion 2"),)  # host/refused_inputs.py
