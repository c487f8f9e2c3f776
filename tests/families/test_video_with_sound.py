"""Video with sound: both are packed in one latent, and both are compared."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import (
    DIFFERENT,
    PLANS,
    TOLERANCE,
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
from tests.support.graphs.diffusers import refused
from tests.support.graphs.flux import (
    UNKNOWN_WRAPPER,
    Graph,
    insert_after,
    insert_after_model,
    node,
    step_by_step,
)
from tests.support.graphs.loras import save_lora, with_lora
from tests.support.graphs.sound import SHOWN, assert_same, both, shown, sound_graph
from tests.support.latents import relative_error
from tests.support.sampler_names import LOCAL
from tests.support.selection import pairwise, thorough
from tests.support.tiny.families.ltx import LTXAV
from tests.vae.comfy_vaes import KINDS, build

SOUND_PLANS: list[dict[str, Any]] = [
    PLANS[0],
    {"devices": "cpu:3", "ring": 3},
    {"devices": "cpu:2", "cfg": 2, "weights": "sharded"},
    {"devices": "cpu:2", "pipefusion": 2},
    {"devices": "cpu:4", "ulysses": 2, "ring": 2},
]


CLASSES = Path(os.environ["COMFYUI_PATH"], "comfy", "model_base.py")
SHOWS_NOISE = re.search(r"def scale_latent_inpaint\(.*denoise_mask", CLASSES.read_text(encoding="utf-8")) is not None
"""Whether MiniMax-H3 is shown what is outside a mask with some noise, as from ComfyUI 0.33 on."""

LAYERS = {
    "minimax": (
        "blocks.0.attn.qkv_proj",
        "blocks.1.mlp.fc2",
        "blocks.2.adaln_proj.linear",
        "token_refiner.blocks.0.attn.out_proj",
        "audio_patch_proj",
        "final_layer.video_out",
    ),
    "ltxav": (
        "transformer_blocks.0.attn1.to_q",
        "transformer_blocks.0.audio_ff.net.2",
        "transformer_blocks.1.video_to_audio_attn.to_v",
        "video_embeddings_connector.transformer_1d_blocks.0.attn1.to_k",
        "audio_adaln_single.linear",
        "proj_out",
    ),
}
"""What their LoRAs change."""


@pytest.fixture(scope="module")
def stock(comfyui: ComfyUI) -> Any:
    """What the stock loader gives, once for each graph."""
    done: dict[str, tuple[Tensor, Tensor]] = {}

    def get(graph: Graph) -> tuple[Tensor, Tensor]:
        if (key := repr(graph)) not in done:
            done[key] = both(comfyui, graph)[:2]
        return done[key]

    return get


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_families(comfyui, "minimax", "ltxav")
    save_latent(comfyui, "ltxav-sound", 1, 8, 11, 16)


@pytest.fixture(scope="module")
def more_files(comfyui: ComfyUI) -> None:
    """The families' other versions and LoRAs, and LTX-2 in a full checkpoint."""
    save_families(comfyui, "minimax_curves", "ltxav23")
    models = comfyui.base_dir / "models"
    for name, layers in LAYERS.items():
        tensors = load_file(models / "diffusion_models" / f"{name}.safetensors")
        names = tuple(f"diffusion_model.{layer}" for layer in layers)
        save_lora(models / "loras" / f"{name}-lora.safetensors", names, tensors)
    whole = {f"model.diffusion_model.{key}": tensor for key, tensor in tensors.items()}
    whole |= {f"vae.{key}": tensor for key, tensor in build("ltx2").state_dict().items()}
    config = {"transformer": LTXAV, "vae": KINDS["ltx2"].settings}
    (models / "checkpoints").mkdir(exist_ok=True)
    save_file(whole, models / "checkpoints" / "ltxav-full.safetensors", {"config": json.dumps(config)})


@pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=() if plan == SOUND_PLANS[1] else thorough) for plan in SOUND_PLANS]
)
@pytest.mark.parametrize("name", ["minimax", "ltxav"])
def test_video_and_sound(name: str, plan: dict[str, Any], comfyui: ComfyUI, stock: Any) -> None:
    graph = sound_graph(name)
    assert_same(comfyui, spread(graph, **plan), stock(graph))


@thorough
@pytest.mark.usefixtures("more_files")
@pytest.mark.parametrize("plan", SOUND_PLANS)
def test_curves_in_the_place_of_a_time_embedder(plan: dict[str, Any], comfyui: ComfyUI, stock: Any) -> None:
    """MiniMax-H3's pruned file."""
    graph = sound_graph("minimax_curves")
    assert_same(comfyui, spread(graph, **plan), stock(graph))


@thorough
@pytest.mark.usefixtures("more_files")
@pytest.mark.parametrize("plan", SOUND_PLANS)
def test_text_that_the_models_own_layers_finish(plan: dict[str, Any], comfyui: ComfyUI, stock: Any) -> None:
    """LTX-2.3, whose text encoder leaves that to the model."""
    plain = sound_graph("ltxav23", steps=2)
    graph = with_tensors(comfyui, plain, "ltxav23", {"unprocessed_ltxav_embeds": torch.tensor(True)})
    expected = stock(graph)
    assert relative_error(stock(plain)[1], expected[1]) > DIFFERENT
    assert_same(comfyui, spread(graph, **plan), expected)


@thorough
@pytest.mark.usefixtures("more_files")
@pytest.mark.parametrize("plan", [SOUND_PLANS[2], SOUND_PLANS[3]])
@pytest.mark.parametrize("name", LAYERS)
def test_lora(name: str, plan: dict[str, Any], comfyui: ComfyUI, stock: Any) -> None:
    plain = sound_graph(name, steps=2)
    graph = with_lora(plain, name, 0.8)
    expected = stock(graph)
    for changed, unchanged in zip(expected, stock(plain), strict=True):
        assert relative_error(unchanged, changed) > DIFFERENT
    assert_same(comfyui, spread(graph, **plan), expected)


@thorough
@pytest.mark.usefixtures("more_files")
@pytest.mark.parametrize("plan", [SOUND_PLANS[0], SOUND_PLANS[3]])
def test_a_full_checkpoint(plan: dict[str, Any], comfyui: ComfyUI, stock: Any) -> None:
    """LTX-2's, with the VAE in it, beside ComfyUI's own loader of such files."""
    graph = sound_graph("ltxav", steps=2)
    ours = spread(graph, **plan)
    ours["model"]["inputs"]["unet_name"] = "checkpoints/ltxav-full.safetensors"
    graph["model"] = node("CheckpointLoaderSimple", ckpt_name="ltxav-full.safetensors")
    assert_same(comfyui, ours, stock(graph))


@pytest.mark.parametrize("name", ["minimax", pytest.param("ltxav", marks=thorough)])
def test_one_forward_at_a_time(name: str, comfyui: ComfyUI, stock: Any) -> None:
    graph = step_by_step(sound_graph(name, steps=2))
    video, sound, (way,) = both(comfyui, spread(graph, strict=False))
    assert way == UNKNOWN_WRAPPER
    for found, expected in zip((video, sound), stock(graph), strict=True):
        assert relative_error(found, expected) <= TOLERANCE


def test_a_node_that_only_the_model_reads(comfyui: ComfyUI, stock: Any) -> None:
    """How the sound's schedule is derived from the video's."""
    plain = sound_graph("minimax", steps=2)
    graph = insert_after_model(plain, "MiniMaxH3SigmaShift", shift_video=9.0, shift_audio=5.0)
    expected = stock(graph)
    alike = insert_after_model(plain, "MiniMaxH3SigmaShift", shift_video=9.0, shift_audio=9.0)
    assert relative_error(stock(alike)[1], expected[1]) > DIFFERENT
    assert_same(comfyui, spread(graph, **PLANS[0]), expected)


@pytest.mark.parametrize("plan", [PLANS[0], pytest.param(SOUND_PLANS[3], marks=thorough)])
def test_first_frame_by_a_mask(plan: dict[str, Any], comfyui: ComfyUI, stock: Any) -> None:
    """LTX-2: each frame of the video has a timestep of its own, the sound has one."""
    plain = sound_graph("ltxav", steps=2)
    graph = masked(plain, 4, 5, 3, of="video")
    expected = stock(graph)
    assert relative_error(stock(plain)[0], expected[0]) > DIFFERENT
    assert_same(comfyui, spread(graph, **plan), expected)


@pytest.mark.parametrize(
    ("what", "plan"),
    [
        pytest.param(what, plan, marks=[thorough] * ((what, plan) != ("references with sound", PLANS[0])))
        for what in SHOWN
        for plan in SOUND_PLANS
    ],
)
def test_what_is_shown_before_the_video(what: str, plan: dict[str, Any], comfyui: ComfyUI, stock: Any) -> None:
    """MiniMax-H3; a seed that no signed number holds draws what is added to pictures."""
    graph = shown(what, seed=2**64 - 2)
    expected = stock(graph)
    assert relative_error(stock(sound_graph("minimax", steps=2, seed=2**64 - 2))[0], expected[0]) > DIFFERENT
    assert_same(comfyui, spread(graph, **plan), expected)


@thorough
@pytest.mark.parametrize("what", SHOWN)
def test_what_is_shown_one_forward_at_a_time(what: str, comfyui: ComfyUI, stock: Any) -> None:
    graph = step_by_step(shown(what))
    assert_same(comfyui, spread(graph, strict=False, **PLANS[0]), stock(graph), UNKNOWN_WRAPPER)


@thorough
@pytest.mark.parametrize("plan", SOUND_PLANS)
def test_a_video_without_sound(plan: dict[str, Any], latent_of: LatentOf) -> None:
    """LTX-2's; without sound it could be cut into patches."""
    graph = {name: each for name, each in sound_graph("ltxav", steps=2).items() if name not in ("apart", "save sound")}
    graph |= {"latent": graph["video"], "save": node("SaveLatent", samples=["sampler", 0], filename_prefix="video")}
    assert relative_error(latent_of(spread(graph, **plan, patches=1)), latent_of(graph)) <= TOLERANCE


def heard(graph: Graph, guided: bool = False) -> Graph:
    """LTX-2's job with a sound as a reference, and with the guidance by it that the node puts on the MODEL."""
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
def test_reference_sound(name: str, guided: bool, plan: dict[str, Any], comfyui: ComfyUI, stock: Any) -> None:
    """With the guidance one forward at a time."""
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
def test_a_batch(plan: dict[str, Any], sampler: str, comfyui: ComfyUI, stock: Any) -> None:
    """LTX-2's, from latents, with a sound as a reference for each."""
    save_latent(comfyui, "videos", 3, 128, 3, 5, 4)
    save_latent(comfyui, "sounds", 3, 8, 11, 16)
    graph = heard(sound_graph("ltxav", sampler_name=sampler, denoise=0.7)) | {
        "video": node("LoadLatent", latent="videos.latent"),
        "sound": node("LoadLatent", latent="sounds.latent"),
    }
    assert_same(comfyui, spread(graph, **plan), stock(graph))


@thorough
@pytest.mark.parametrize("plan", SOUND_PLANS)
@pytest.mark.parametrize("both_masked", [False, True])
@pytest.mark.parametrize("name", ["minimax", "ltxav"])
def test_a_mask_of_the_sound(name: str, both_masked: bool, plan: dict[str, Any], comfyui: ComfyUI, stock: Any) -> None:
    """A part of the sound is kept, with the video's first frame or without."""
    save_latent(comfyui, "kept-video", 1, *((24, 7, 8, 6) if name == "minimax" else (128, 3, 5, 4)))
    save_latent(comfyui, "kept-sound", 1, *((32, 2, 37) if name == "minimax" else (8, 11, 16)))
    plain = sound_graph(name, steps=2) | {
        "video": node("LoadLatent", latent="kept-video.latent"),
        "sound": node("LoadLatent", latent="kept-sound.latent"),
        "latent": packed("video", "sound"),
    }
    width, height = (37, 2) if name == "minimax" else (16, 11)
    halves = {
        "kept": node("SolidMask", value=0.0, width=width, height=height),
        "made": node("SolidMask", value=0.7, width=width, height=height // 2),
        "of the sound": node("MaskComposite", destination=["kept", 0], source=["made", 0], x=0, y=0, operation="add"),
    }
    graph = insert_after(plain, "sound", "SetLatentNoiseMask", "samples", mask=["of the sound", 0]) | halves
    if both_masked:
        graph = masked(graph, *((6, 8, 7) if name == "minimax" else (4, 5, 3)), of="video")
    expected = stock(graph)
    assert relative_error(stock(plain)[1], expected[1]) > DIFFERENT
    if name == "minimax" and SHOWS_NOISE:
        assert_same(comfyui, spread(graph, **plan, strict=False), expected, "a mask with the model MiniMaxH3")
    else:
        assert_same(comfyui, spread(graph, **plan), expected)


SPLITS_OR_STAGES: Mapping[str, dict[str, Any]] = {
    "ulysses 2": PLANS[0],
    "cfg 2": {"devices": "cpu:2", "cfg": 2},
    "pipefusion 2": SOUND_PLANS[3],
}


@thorough
@pairwise(sampler=LOCAL, name=("minimax", "ltxav"), split=SPLITS_OR_STAGES)
def test_samplers(sampler: str, name: str, split: dict[str, Any], comfyui: ComfyUI, stock: Any) -> None:
    """Noise is of both latents, packed in one.

    CFG++ adds what guidance gives at full weight in each step, and MiniMax-H3's sound is scaled by up to 4, so rounding of
    2e-7 in a forward grows to 6e-6 at cfg 1.5, which is what it is made for, and in proportion to cfg.
    """
    cfg = 1.5 if sampler.endswith("cfg_pp") else 2.5
    graph = sound_graph(name, sampler_name=sampler, steps=4, cfg=cfg)
    assert_same(comfyui, spread(graph, **split), stock(graph))


def test_a_guider_and_a_sampler(comfyui: ComfyUI, stock: Any) -> None:
    """As ComfyUI's template of MiniMax-H3 has them."""
    graph = sound_graph("minimax")
    links = {name: [name, 0] for name in ("noise", "guider", "sigmas")}
    graph |= {
        "noise": node("RandomNoise", noise_seed=7),
        "guider": node("BasicGuider", model=["model", 0], conditioning=["positive", 0]),
        "select": node("KSamplerSelect", sampler_name="res_multistep"),
        "sigmas": node("BasicScheduler", model=["model", 0], scheduler="simple", steps=3, denoise=1.0),
        "sampler": node("SamplerCustomAdvanced", **links, sampler=["select", 0], latent_image=["latent", 0]),
    }
    assert_same(comfyui, spread(graph, strict=False, **PLANS[0]), stock(graph))


GUIDES: dict[str, dict[str, Any]] = {
    "whole": {},
    "weak": {"strength": 0.7},
    "masked": {"attention_mask": ["half", 0]},
    "strong": {"strength": 1.5, "attention_mask": ["half", 0]},
}


@thorough
@pytest.mark.parametrize("plan", SOUND_PLANS)
@pytest.mark.parametrize("guide", GUIDES)
def test_guides(guide: str, plan: dict[str, Any], comfyui: ComfyUI, stock: Any) -> None:
    """LTX-2's: strength and mask of a guide weigh attention between its tokens and the video's."""
    graph = guided("ltxav", comfyui, guide)
    expected = stock(graph)
    if guide != "whole":
        assert relative_error(stock(guided("ltxav", comfyui, "whole"))[0], expected[0]) > MATTERS
    assert_same(comfyui, spread(graph, **plan), expected)


def guided(name: str, server: ComfyUI, guide: str) -> Graph:
    half = {
        "none": node("SolidMask", value=0.0, width=128, height=160),
        "some": node("SolidMask", value=0.6, width=64, height=160),
        "half": node("MaskComposite", destination=["none", 0], source=["some", 0], x=0, y=0, operation="add"),
    }
    return with_guides(server, sound_graph(name, steps=2) | half, "video", **GUIDES[guide])


def packed(video: str, sound: str) -> Any:
    return node("LTXVConcatAVLatent", video_latent=[video, 0], audio_latent=[sound, 0])


@pytest.mark.parametrize(
    ("name", "latent", "said"),
    [
        ("minimax", node("LoadLatent", latent="silent.latent"), "holds a video alone"),
        ("minimax", packed("two", "two sounds"), "makes one video at a time"),
        ("ltxav", packed("video", "video"), "takes [batch, 8, length, 16]"),
        ("wan", packed("wan", "sound"), "takes [batch, 16, frames, height, width]"),
    ],
)
def test_other_latents_are_refused(comfyui: ComfyUI, name: str, latent: Any, said: str) -> None:
    save_families(comfyui, "wan")
    shapes = {"silent": (1, 24, 2, 4, 4), "two": (2, 24, 2, 4, 4), "two sounds": (2, 32, 2, 9)}
    for file, shape in shapes.items():
        save_latent(comfyui, file, *shape)
    graph = sound_graph("ltxav") | {file: node("LoadLatent", latent=f"{file}.latent") for file in shapes}
    loaders = {key: graph_of(name)[key] for key in ("model", "positive", "negative")}
    graph |= {**loaders, "wan": graph_of("wan")["latent"], "latent": latent}
    assert said in refused(comfyui, spread(graph))
