"""A copy of ComfyUI with a made-up model class: its model file, its detection, and its inputs."""

from __future__ import annotations

import shutil
from pathlib import Path

from scripts.comfyui import ComfyUI
from tests.support.copies.sized import copied

DETECTION = """

_known = detect_unet_config


def detect_unet_config(state_dict, key_prefix, metadata=None):
    if f"{key_prefix}embed_hint.weight" not in state_dict:
        return _known(state_dict, key_prefix, metadata=metadata)
    depth = count_blocks(state_dict, f"{key_prefix}layers." + "{}.")
    width, text = state_dict[f"{key_prefix}embed_text.weight"].shape
    every = -(-depth // count_blocks(state_dict, f"{key_prefix}hints." + "{}."))
    sizes = {"width": width, "heads": width // 32, "text_width": text, "depth": depth, "every": every}
    return {"image_model": "unheard", **sizes}
"""

BASE = """

import comfy.ldm.unheard


class Unheard(BaseModel):
    def __init__(self, model_config, model_type=ModelType.FLOW, device=None):
        super().__init__(model_config, model_type, device=device, unet_model=comfy.ldm.unheard.Unheard)

    def extra_conds(self, **kwargs):
        out = super().extra_conds(**kwargs)
        out["c_crossattn"] = comfy.conds.CONDRegular(kwargs["cross_attn"])
        out["hint"] = comfy.conds.CONDRegular(kwargs["hint"])
        out["sound"] = comfy.conds.CONDRegular(kwargs["sound"])
        return out
"""

SUPPORTED = """


class Unheard(supported_models_base.BASE):
    unet_config = {"image_model": "unheard"}
    unet_extra_config = {}
    sampling_settings = {"shift": 3.0}
    latent_format = latent_formats.Wan21
    memory_usage_factor = 1.0

    def get_model(self, state_dict, prefix="", device=None):
        return model_base.Unheard(self, device=device)


models.append(Unheard)
"""


def comfyui_with_it(folder: Path) -> ComfyUI:
    """Copy the ComfyUI under test into a folder, and add the made-up class."""
    server = copied(
        folder,
        {
            "comfy/model_detection.py": DETECTION,
            "comfy/model_base.py": BASE,
            "comfy/supported_models.py": SUPPORTED,
        },
    )
    shutil.copy(Path(__file__).parent / "model.py", folder / "ComfyUI" / "comfy" / "ldm" / "unheard.py")
    return server
