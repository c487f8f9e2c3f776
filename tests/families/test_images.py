"""Families of pictures through a real ComfyUI against its own loader: each split, a LoRA, references and other inputs.

Anima, HunyuanImage 2.1 and its refiner, JoyImage, Kandinsky 5, Krea 2, Lens, LongCat-Image, Ovis and Stable Diffusion 3, and
reduced families at their real width.
"""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import EVERY_SPLIT, TOKENS, TOLERANCE, LatentOf, graph_of, spread
from tests.support.graphs.comfyui_inputs import MATTERS, graph_with
from tests.support.graphs.family_checks import assert_matters_and_stock, assert_stock
from tests.support.graphs.family_tests import Families, Given, assert_same, job, save_with_loras, save_with_prompts
from tests.support.graphs.flux import Graph, insert_after_model, node
from tests.support.graphs.loras import with_lora
from tests.support.latents import relative_error
from tests.support.selection import thorough
from tests.support.tiny.families.hunyuan import LAYERS
from tests.support.tiny.families.images import KANDINSKY_LAYERS
from tests.support.tiny.models import draw

REFERENCES = ((16, 1, 6, 5), (16, 1, 3, 4))


class TestImages(Families):
    layers: ClassVar = {
        "anima": (
            "blocks.0.self_attn.q_proj",
            "blocks.9.mlp.layer2",
            "blocks.4.adaln_modulation_mlp.2",
            "llm_adapter.blocks.0.cross_attn.k_proj",
            "final_layer.linear",
        ),
        "hunyuan_image": LAYERS,
        "joyimage": ("double_blocks.0.attn.img_attn_qkv", "double_blocks.1.attn.txt_attn_proj", "proj_out"),
        "kandinsky_image": KANDINSKY_LAYERS,  # at the width that ComfyUI assumes, in fp8
        "krea2": (
            "blocks.0.attn.wq",
            "blocks.1.attn.wk",
            "blocks.2.mlp.down",
            "txtfusion.refiner_blocks.0.attn.wv",
            "tproj.1",
            "last.linear",
        ),
        "lens": ("transformer_blocks.0.attn.img_qkv", "transformer_blocks.1.txt_mlp.w1", "txt_in"),
        "longcat": (
            "double_blocks.0.img_attn.qkv",
            "double_blocks.1.txt_mlp.2",
            "single_blocks.0.linear1",
            "final_layer.linear",
        ),
        "ovis": ("double_blocks.0.img_attn.qkv", "double_blocks.1.txt_mlp.gate_proj", "single_blocks.0.linear1"),
        "sd3": (
            "joint_blocks.0.x_block.attn.qkv",
            "joint_blocks.1.x_block.attn2.proj",
            "joint_blocks.1.context_block.mlp.fc1",
            "context_embedder",
            "final_layer.linear",
        ),
    }
    given: ClassVar = {
        "hunyuan image, words in quotation marks": Given(
            "hunyuan_image", {"conditioning_byt5small": draw(1, 3, 1472, seed=31)}
        ),
        "hunyuan image, masked text": Given(  # on one branch, as with a longer prompt on the other branch
            "hunyuan_image", {"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0]])}, sides=("positive",)
        ),
        "joyimage, references": Given("joyimage", references=REFERENCES, sides=("positive",)),
        "krea 2, references": Given("krea2", references=REFERENCES, method="index"),
        "krea 2, references without noise": Given(
            "krea2", references=REFERENCES, method="index_timestep_zero", sides=("positive",)
        ),
        "longcat-image, a picture to edit": Given("longcat", references=((16, 6, 5),)),
    }
    matters = MATTERS


@pytest.mark.parametrize("name", ["krea2", "sd3"])
def test_a_declared_model_gives_the_stock_result(name: str, comfyui: ComfyUI, latent_of: LatentOf) -> None:
    """SD 3's position embedding, which is no parameter of ComfyUI's class, is loaded too."""
    assert_stock(latent_of, graph_with(comfyui, name))


def test_positions_that_a_model_class_shifts_give_the_stock_latent(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    """LongCat-Image's class shifts positions by the length of its text, one model call at a time."""
    assert_stock(latent_of, graph_with(comfyui, "longcat"), strict=False)


def test_easycache_has_no_effect_on_a_class_that_does_not_support_it(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    """EasyCache has no effect with the stock loader either: ComfyUI's SD 3 calls no wrappers."""
    settings = {"reuse_threshold": 3.0, "start_percent": 0.0, "end_percent": 1.0, "verbose": False}
    graph = graph_with(comfyui, "sd3")
    cached = insert_after_model(graph, "EasyCache", **settings)
    assert relative_error(latent_of(spread(cached, strict=False)), latent_of(graph)) <= TOLERANCE


def refining() -> Graph:
    """Return a graph that refines a latent with HunyuanImage 2.1's second model."""
    graph = graph_of("refiner")
    sides = {side: [side, 0] for side in TOKENS}
    graph["refine"] = node("HunyuanRefinerLatent", **sides, latent=["latent", 0], noise_augmentation=0.1)
    graph["sampler"]["inputs"] |= {"positive": ["refine", 0], "negative": ["refine", 1], "latent_image": ["refine", 2]}
    return graph


@thorough
@pytest.mark.parametrize("split", EVERY_SPLIT)
def test_hunyuan_images_refiner_gives_the_stock_latent(split: str, comfyui: ComfyUI, latent_of: LatentOf) -> None:
    save_with_loras(comfyui, {"refiner": (*LAYERS[:1], "single_blocks.1.linear1", *LAYERS[3:])})
    plain = refining()
    assert_stock(latent_of, plain, **EVERY_SPLIT[split])
    assert_matters_and_stock(latent_of, plain, with_lora(plain, "refiner", 0.8), **EVERY_SPLIT[split])


@thorough
@pytest.mark.parametrize("family", ["auraflow", "ideogram", "lumina", "mage_flow", "radiance"])
def test_a_model_of_the_real_width_gives_the_stock_latent(family: str, comfyui: ComfyUI, latent_of: LatentOf) -> None:
    """The model has one or two blocks of a kind, in fp8, at the width that ComfyUI assumes.

    The file takes hundreds of megabytes. The graph has one step, because each call casts all weights.
    """
    name = f"wide_{family}"
    save_with_prompts(comfyui, name)
    assert_same(latent_of, name, "ulysses 2", job(name, steps=1))
    (comfyui.base_dir / "models" / "diffusion_models" / f"{name}.safetensors").unlink()  # some files take a gigabyte
