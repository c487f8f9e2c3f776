"""Families of videos through a real ComfyUI against its own loader: each split, a LoRA, and the inputs of their own nodes.

Cosmos Predict2, FlowRVS, HuMo, HunyuanVideo, HunyuanVideo 1.5 and its super-resolution, Kandinsky 5, SkyReels, Wan Animate, Wan's
camera models and Wan Fun Control. Inputs that belong to frames: SCAIL has poses after the video's tokens, and persons. Wan S2V
has sound between blocks and earlier frames, WanDancer has music.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import (
    PLANS,
    LatentOf,
    graph_of,
    save_families,
    save_latent,
    spread,
    with_reference,
    with_tensors,
)
from tests.support.graphs.diffusers import refused
from tests.support.graphs.family_checks import assert_matters_and_stock, assert_stock
from tests.support.graphs.family_tests import Families, Given
from tests.support.graphs.flux import step_by_step
from tests.support.graphs.videos import FIRST, PERSON, PICTURE, SEEN
from tests.support.selection import thorough
from tests.support.tiny.families import hunyuan, wan
from tests.support.tiny.families.images import KANDINSKY_LAYERS
from tests.support.tiny.models import draw

COSMOS = ("blocks.0.self_attn.q_proj", "blocks.9.mlp.layer2", "blocks.4.adaln_modulation_mlp.2", "final_layer.linear")
HUNYUAN15 = tuple(name for name in hunyuan.LAYERS if not name.startswith("single"))
SMALL_PICTURE = {"concat_latent_image": draw(1, 32, 3, 4, 5, seed=33)}
SMALL_FIRST = SMALL_PICTURE | {
    "concat_mask": (torch.arange(3) > 0).float().view(1, 1, 3, 1, 1).expand(1, 1, 3, 4, 5).contiguous()
}
SHOWN = {"clip_vision_output": draw(1, 5, 1152, seed=34)}
GLYPHS = {"conditioning_byt5small": draw(1, 3, 1472, seed=35)}
CAMERA = {"camera_conditions": draw(1, 24, 3, 64, 80, seed=23)}
POSE = {"pose_video_latent": draw(1, 16, 3, 4, 5, seed=41), "clip_vision_output": draw(1, 5, 1280, seed=42)}
PERSONS = {
    "pose_video_latent": draw(1, 16, 3, 4, 5, seed=27),
    "driving_mask_28ch": draw(1, 3, 28, 4, 5, seed=29).gt(0).float(),
    "ref_mask_28ch": (draw(1, 4, 28, 8, 10, seed=32).gt(0) & (torch.arange(4) < 1).view(1, 4, 1, 1, 1)).float(),
}
SOUND = {"audio_embed": draw(1, 25, 1024, 12, seed=43), "control_video": draw(1, 16, 3, 8, 10, seed=44)}
MUSIC = {"audio_embed": draw(1, 20, 35, seed=45), "clip_vision_output": draw(1, 5, 1280, seed=46)}
SLOWLY = {
    "fps": torch.tensor(7.5),
    "audio_inject_scale": torch.tensor(0.8),
    "clip_vision_output_ref": draw(1, 5, 1280, seed=37),
}


class TestVideos(Families):
    layers: ClassVar = {
        **dict.fromkeys(("cosmos", "cosmos_i2v"), COSMOS),
        **dict.fromkeys(("hunyuan", "hunyuan_i2v", "skyreels"), hunyuan.LAYERS),
        "hunyuan15": HUNYUAN15,
        "meanflow": (*HUNYUAN15, "time_r_in.in_layer"),
        "kandinsky": KANDINSKY_LAYERS,
        **dict.fromkeys(
            ("animate", "camera", "camera22", "flow_rvs", "fun_control", "humo", "humo_17b"),
            wan.LAYERS,
        ),
        **dict.fromkeys(("scail", "scail2", "s2v", "dancer"), wan.LAYERS),
    }
    given: ClassVar = {
        "cosmos-predict2 i2v, first frame": Given("cosmos_i2v", mask=True),
        "hunyuan, first frame": Given("hunyuan", {"guiding_frame_index": torch.tensor(0.0)}, mask=True),
        "hunyuan, reference": Given("hunyuan", {"ref_latent": draw(1, 16, 1, 8, 10, seed=24)}),
        "hunyuan i2v, first frame": Given("hunyuan_i2v", FIRST),
        "hunyuan 1.5, masked text": Given(  # ComfyUI's own model supports the mask only without further inputs
            "hunyuan15", {"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0]])}, sides=("positive",)
        ),
        "hunyuan 1.5, first frame": Given("hunyuan15", SMALL_FIRST | SHOWN),
        "hunyuan 1.5, words in quotation marks": Given("hunyuan15", GLYPHS),
        "hunyuan 1.5 super-resolution": Given(
            "meanflow",
            {"concat_latent_image": draw(1, 66, 3, 4, 5, seed=36), "noise_augmentation": torch.tensor(0.3)}
            | SHOWN
            | GLYPHS,
        ),
        "skyreels, first frame": Given("skyreels", PICTURE),
        "kandinsky, first frame": Given("kandinsky", {"time_dim_replace": draw(1, 16, 1, 8, 10, seed=28)}),
        "animate, pose": Given("animate", {"pose_video_latent": draw(1, 16, 2, 8, 10, seed=26), **SEEN, **FIRST}),
        "wan 2.1, camera": Given("camera", CAMERA | SEEN | PICTURE),
        "wan 2.2, camera": Given("camera22", CAMERA | FIRST),
        "wan fun, control": Given("fun_control", {"concat_latent_image": draw(1, 32, 3, 8, 10, seed=30)} | SEEN),
        "humo, person": Given("humo", references=PERSON),
        "humo 17b, person": Given("humo_17b", references=PERSON),
        "scail, pose": Given("scail", POSE, references=PERSON),
        "scail 2, persons": Given("scail2", PERSONS | SEEN, references=PERSON),
        "s2v, sound": Given("s2v", SOUND, references=PERSON),
        "s2v, what came before": Given(
            "s2v", {**SOUND, "reference_motion": draw(1, 16, 19, 8, 10, seed=38)}, references=PERSON
        ),
        "s2v, longer sound": Given("s2v", {**SOUND, "audio_embed": draw(1, 25, 1024, 17, seed=43)}),
        "s2v, shorter sound": Given("s2v", {**SOUND, "audio_embed": draw(1, 25, 1024, 7, seed=43)}),
        "wan dancer, longer music": Given("dancer", {**MUSIC, "audio_embed": draw(1, 33, 35, seed=43)}),
        "wan dancer, shorter music": Given("dancer", {**MUSIC, "audio_embed": draw(1, 7, 35, seed=43)}),
        "wan dancer, music of one frame": Given("dancer", {"audio_embed": draw(1, 1, 35, seed=47)}),
        "wan dancer, music": Given("dancer", MUSIC),
        "wan dancer, all it takes": Given("dancer", {**MUSIC, **SLOWLY}),
    }


def test_meanflow_gives_the_stock_latent_in_the_loop(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    """HunyuanVideo 1.5's super-resolution reads the next step's sigma."""
    save_families(comfyui, "meanflow")
    assert_stock(latent_of, graph_of("meanflow", steps=2), pipefusion=2, warmup_steps=99)


@thorough  # in the quick run the loop; ComfyUI's own loop gives the sigmas to each call
def test_meanflow_one_model_call_at_a_time_gives_the_stock_latent(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    save_families(comfyui, "meanflow")
    assert_stock(latent_of, step_by_step(graph_of("meanflow")), strict=False)


def test_sound_by_frame_gives_the_stock_latent(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    """Run Wan S2V under one plan. models/test_sequence_parallel runs SCAIL, Wan S2V and WanDancer under the other plans."""
    save_families(comfyui, "s2v")
    save_latent(comfyui, "person", 1, *PERSON[0])
    plain = with_reference(graph_of("s2v", steps=2), "person")
    assert_matters_and_stock(latent_of, plain, with_tensors(comfyui, plain, "s2v", SOUND), **PLANS[1])


@thorough
def test_sound_that_is_too_short_is_refused_where_frames_are_divided(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    save_families(comfyui, "s2v")
    graph = with_tensors(comfyui, graph_of("s2v"), "s2v-short", {"audio_embed": draw(1, 25, 1024, 5, seed=48)})
    for plan in (PLANS[0], PLANS[2]):
        assert refused(comfyui, spread(graph, **plan)) == (
            "audio_emb of the model's AudioInjector_WAN has 2 entries for 3 parts of the latent, which is not "
            "supported with a parallel MODEL: remove the node that sets it, or use Load Diffusion Model."
        )
    # PipeFusion keeps all frames together here
    assert_stock(latent_of, graph, **PLANS[1])
