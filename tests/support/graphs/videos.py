"""What each model for videos is given beside its text, and how it matters."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tests.support.graphs.by_frame import GIVEN as BY_FRAME
from tests.support.graphs.family_tests import Given
from tests.support.tiny.models import draw

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
SMALL = {"concat_latent_image": draw(1, 32, 3, 4, 5, seed=33)}
SMALL_FIRST = SMALL | {
    "concat_mask": (torch.arange(3) > 0).float().view(1, 1, 3, 1, 1).expand(1, 1, 3, 4, 5).contiguous()
}
SHOWN = {"clip_vision_output": draw(1, 5, 1152, seed=34)}
SLOWLY = {
    "fps": torch.tensor(7.5),
    "audio_inject_scale": torch.tensor(0.8),
    "clip_vision_output_ref": draw(1, 5, 1280, seed=37),
}
GLYPHS = {"conditioning_byt5small": draw(1, 3, 1472, seed=35)}
GIVEN: Mapping[str, Given] = {
    "ltx-video, first frame": Given("ltxv", mask=True),
    "ltx-video, frames a second": Given("ltxv", {"frame_rate": torch.tensor(12.5)}),
    "hunyuan 1.5, masked text": Given(  # which ComfyUI's own takes with nothing beside it
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
    "scail, pose": Given("scail", BY_FRAME["scail"], references=PERSON),
    "s2v, sound": Given("s2v", BY_FRAME["s2v"], references=PERSON),
    "s2v, what came before": Given(
        "s2v", {**BY_FRAME["s2v"], "reference_motion": draw(1, 16, 19, 8, 10, seed=38)}, references=PERSON
    ),
    "s2v, longer sound": Given("s2v", {**BY_FRAME["s2v"], "audio_embed": draw(1, 25, 1024, 17, seed=43)}),
    "s2v, shorter sound": Given("s2v", {**BY_FRAME["s2v"], "audio_embed": draw(1, 25, 1024, 7, seed=43)}),
    "wan dancer, longer music": Given("dancer", {**BY_FRAME["dancer"], "audio_embed": draw(1, 33, 35, seed=43)}),
    "wan dancer, shorter music": Given("dancer", {**BY_FRAME["dancer"], "audio_embed": draw(1, 7, 35, seed=43)}),
    "wan dancer, music": Given("dancer", BY_FRAME["dancer"]),
    "wan dancer, all it takes": Given("dancer", {**BY_FRAME["dancer"], **SLOWLY}),
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
