"""LTX-Video, LTX-2 and 2.3 through a real ComfyUI against its own loader: first frames, masks, sounds and guides.

LTX-2's two latents are compared, the video's and the sound's.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import (
    DIFFERENT,
    PLANS,
    LatentOf,
    graph_of,
    masked,
    save_families,
    save_latent,
    spread,
    with_guides,
    with_tensors,
)
from tests.support.graphs.comfyui_inputs import MATTERS
from tests.support.graphs.family_checks import assert_stock
from tests.support.graphs.family_tests import Families, Given
from tests.support.graphs.flux import Graph, insert_after, node, step_by_step
from tests.support.graphs.sound import assert_same, sound_graph
from tests.support.graphs.sound_tests import SOUND_PLANS, Stock
from tests.support.latents import relative_error
from tests.support.selection import thorough
from tests.support.tiny.comfyui import TINY
from tests.support.tiny.families.ltx import LTXAV
from tests.vae.comfy_vaes import KINDS, build


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_families(comfyui, "ltxav", "ltxv")
    save_latent(comfyui, "ltxav-sound", 1, 8, 11, 16)


class TestVideos(Families):
    layers: ClassVar = {
        "ltxv": (
            "transformer_blocks.0.attn1.to_q",
            "transformer_blocks.1.attn2.to_v",
            "transformer_blocks.1.ff.net.2",
            "caption_projection.linear_1",
            "proj_out",
        ),
    }
    given: ClassVar = {
        "ltx-video, first frame": Given("ltxv", mask=True),
        "ltx-video, frames a second": Given("ltxv", {"frame_rate": torch.tensor(12.5)}),
    }


def test_masked_text_gives_the_stock_result(latent_of: LatentOf) -> None:
    """The text has a mask; the model has the settings of its file's header."""
    assert_stock(latent_of, graph_of("ltxv", steps=2), **PLANS[1])


def test_image_to_video_gives_the_stock_latent(latent_of: LatentOf) -> None:
    """The model keeps the latent outside the mask, and has a timestep for each token."""
    plain = graph_of("ltxv", steps=2)
    graph = insert_after(plain, "latent", "SetLatentNoiseMask", "samples", mask=["mask", 0]) | {
        "solid": node("SolidMask", value=1.0, width=160, height=128),
        "mask": node("FeatherMask", mask=["solid", 0], left=128, top=0, right=0, bottom=0),
    }
    assert relative_error(latent_of(plain), latent_of(graph)) > 0.01
    assert_stock(latent_of, graph)


@thorough
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("strength", [1.0, 0.7])
def test_guides_on_ltx_video_give_the_stock_latents(
    comfyui: ComfyUI, strength: float, plan: dict[str, Any], latent_of: LatentOf
) -> None:
    """A guide of less strength weighs attention between its tokens and the video's."""
    assert_stock(latent_of, with_guides(comfyui, graph_of("ltxv"), "latent", strength=strength), **plan)


def test_a_guide_with_a_mask_next_to_other_masks_of_texts_gives_the_stock_latent(
    comfyui: ComfyUI, latent_of: LatentOf
) -> None:
    """One model call contains both texts, and is divided between them. The guide's mask applies to all rows."""
    graph = graph_of("ltxv", steps=2)
    for side, hidden in (("positive", 2), ("negative", 3)):
        [(cond, options)] = TINY["ltxv"].prompt(7, seed=hidden)
        options["attention_mask"] = (torch.arange(7) < 7 - hidden).long()[None]
        save_file({"cond": cond, **options}, comfyui.input_dir / f"masked-{side}.safetensors")
        graph[side] = node("LoadConditioning", conditioning=f"masked-{side}.safetensors")
    graph["left"] = node("SolidMask", value=0.3, width=160, height=128)
    graph = step_by_step(with_guides(comfyui, graph, "latent", attention_mask=["left", 0]))
    assert_stock(latent_of, graph, strict=False, ulysses=2)


@pytest.fixture(scope="module")
def more_files(comfyui: ComfyUI) -> None:
    """Save LTX-2.3 and LTX-2's full checkpoint."""
    save_families(comfyui, "ltxav23")
    models = comfyui.base_dir / "models"
    tensors = load_file(models / "diffusion_models" / "ltxav.safetensors")
    whole = {f"model.diffusion_model.{key}": tensor for key, tensor in tensors.items()}
    whole |= {f"vae.{key}": tensor for key, tensor in build("ltx2").state_dict().items()}
    config = {"transformer": LTXAV, "vae": KINDS["ltx2"].settings}
    (models / "checkpoints").mkdir(exist_ok=True)
    save_file(whole, models / "checkpoints" / "ltxav-full.safetensors", {"config": json.dumps(config)})


@thorough
@pytest.mark.usefixtures("more_files")
@pytest.mark.parametrize("plan", SOUND_PLANS)
def test_text_that_the_models_own_layers_finish_gives_the_stock_latents(
    plan: dict[str, Any], comfyui: ComfyUI, stock: Stock
) -> None:
    """LTX-2.3's text encoder leaves its last layers to the model."""
    plain = sound_graph("ltxav23", steps=2)
    graph = with_tensors(comfyui, plain, "ltxav23", {"unprocessed_ltxav_embeds": torch.tensor(True)})
    expected = stock(graph)
    assert relative_error(stock(plain)[1], expected[1]) > DIFFERENT
    assert_same(comfyui, spread(graph, **plan), expected)


@thorough
@pytest.mark.usefixtures("more_files")
@pytest.mark.parametrize("plan", [SOUND_PLANS[0], SOUND_PLANS[3]])
def test_a_full_checkpoint_gives_the_stock_latents(plan: dict[str, Any], comfyui: ComfyUI, stock: Stock) -> None:
    """The checkpoint also contains the VAE; ComfyUI's own loader of checkpoints gives the expected latents."""
    graph = sound_graph("ltxav", steps=2)
    ours = spread(graph, **plan)
    ours["model"]["inputs"]["unet_name"] = "checkpoints/ltxav-full.safetensors"
    graph["model"] = node("CheckpointLoaderSimple", ckpt_name="ltxav-full.safetensors")
    assert_same(comfyui, ours, stock(graph))


@pytest.mark.parametrize("plan", [PLANS[0], pytest.param(SOUND_PLANS[3], marks=thorough)])
def test_a_first_frame_by_a_mask_gives_the_stock_latents(plan: dict[str, Any], comfyui: ComfyUI, stock: Stock) -> None:
    """Each frame of the video has a timestep of its own; the sound has one timestep."""
    plain = sound_graph("ltxav", steps=2)
    graph = masked(plain, 4, 5, 3, of="video")
    expected = stock(graph)
    assert relative_error(stock(plain)[0], expected[0]) > DIFFERENT
    assert_same(comfyui, spread(graph, **plan), expected)


@thorough
@pytest.mark.parametrize("plan", SOUND_PLANS)
def test_a_video_without_sound_gives_the_stock_latent(plan: dict[str, Any], latent_of: LatentOf) -> None:
    """The plan has one patch, because PipeFusion could divide a video without sound into patches."""
    graph = {name: each for name, each in sound_graph("ltxav", steps=2).items() if name not in ("apart", "save sound")}
    graph |= {"latent": graph["video"], "save": node("SaveLatent", samples=["sampler", 0], filename_prefix="video")}
    assert_stock(latent_of, graph, **plan, patches=1)


def heard(graph: Graph, guided: bool = False) -> Graph:
    """Add a sound as a reference, and on request the guidance that the reference's node sets on the MODEL."""
    links = {"model": ["model", 0], "positive": ["positive", 0], "negative": ["negative", 0]}
    strength = {"identity_guidance_scale": 3.0, "start_percent": 0.0, "end_percent": 1.0}
    sound = {"reference_audio": ["voice", 0], "audio_vae": ["encoders", 3]}
    given = graph["sampler"]["inputs"] | {"positive": ["heard", 1], "negative": ["heard", 2]}
    return graph | {
        "encoders": node("PackEncoders", conditioning=["positive", 0]),
        "voice": node("EmptyAudio", duration=0.15, sample_rate=16000, channels=2),
        "heard": node("LTXVReferenceAudio", **links, **strength, **sound),
        "sampler": node("KSampler", **given | ({"model": ["heard", 0]} if guided else {})),
    }


@thorough
@pytest.mark.usefixtures("more_files")
@pytest.mark.parametrize("plan", SOUND_PLANS)
@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("name", ["ltxav", "ltxav23"])
def test_a_reference_sound_gives_the_stock_latents(
    name: str, guided: bool, plan: dict[str, Any], comfyui: ComfyUI, stock: Stock
) -> None:
    """The guidance makes the graph run one model call at a time."""
    plain = sound_graph(name, steps=2)
    graph = heard(plain, guided)
    expected = stock(graph)
    for changed, unchanged in zip(expected, stock(plain), strict=True):
        assert relative_error(unchanged, changed) > DIFFERENT
    way = "the model option sampler_post_cfg_function" if guided else "loop"
    assert_same(comfyui, spread(graph, strict=not guided, **plan), expected, way)


@thorough
@pytest.mark.parametrize("sampler", ["euler", "dpmpp_sde", "sa_solver"])
@pytest.mark.parametrize("plan", [PLANS[0], {"devices": "cpu:2", "data": 2}, {"devices": "cpu:2", "cfg": 2}])
def test_a_batch_with_reference_sounds_gives_the_stock_latents(
    plan: dict[str, Any], sampler: str, comfyui: ComfyUI, stock: Stock
) -> None:
    """The batch starts from latents, with a sound as a reference for each row."""
    save_latent(comfyui, "videos", 3, 128, 3, 5, 4)
    save_latent(comfyui, "sounds", 3, 8, 11, 16)
    graph = heard(sound_graph("ltxav", sampler_name=sampler, denoise=0.7)) | {
        "video": node("LoadLatent", latent="videos.latent"),
        "sound": node("LoadLatent", latent="sounds.latent"),
    }
    assert_same(comfyui, spread(graph, **plan), stock(graph))


GUIDES: dict[str, dict[str, Any]] = {
    "whole": {},
    "weak": {"strength": 0.7},
    "masked": {"attention_mask": ["half", 0]},
    "strong": {"strength": 1.5, "attention_mask": ["half", 0]},
}


@thorough
@pytest.mark.parametrize("plan", SOUND_PLANS)
@pytest.mark.parametrize("guide", GUIDES)
def test_guides_give_the_stock_latents(guide: str, plan: dict[str, Any], comfyui: ComfyUI, stock: Stock) -> None:
    """Strength and mask of a guide weigh attention between its tokens and the video's."""
    graph = guided(comfyui, guide)
    expected = stock(graph)
    if guide != "whole":
        assert relative_error(stock(guided(comfyui, "whole"))[0], expected[0]) > MATTERS
    assert_same(comfyui, spread(graph, **plan), expected)


def guided(server: ComfyUI, guide: str) -> Graph:
    half = {
        "none": node("SolidMask", value=0.0, width=128, height=160),
        "some": node("SolidMask", value=0.6, width=64, height=160),
        "half": node("MaskComposite", destination=["none", 0], source=["some", 0], x=0, y=0, operation="add"),
    }
    return with_guides(server, sound_graph("ltxav", steps=2) | half, "video", **GUIDES[guide])
