"""Autoencoder key maps: the names in files of the parameters of diffusers' modules.

CogVideoX's files have diffusers' names. Files of AutoencoderKL (FLUX, Stable Diffusion) have those of the original
latent diffusion, which ComfyUI uses, or diffusers'.
"""

from __future__ import annotations

import re

RENAMED = (
    (r"\.conv_norm_out\.", ".norm_out."),
    (r"\.mid_block\.attentions\.0\.group_norm\.", ".mid.attn_1.norm."),
    (r"\.mid_block\.attentions\.0\.to_out\.0\.", ".mid.attn_1.proj_out."),
    (r"\.mid_block\.attentions\.0\.to_([qkv])\.", r".mid.attn_1.\1."),
    (r"\.mid_block\.resnets\.0\.", ".mid.block_1."),
    (r"\.mid_block\.resnets\.1\.", ".mid.block_2."),
    (r"\.down_blocks\.(\d+)\.downsamplers\.0\.", r".down.\1.downsample."),
    (r"\.down_blocks\.(\d+)\.resnets\.", r".down.\1.block."),
    (r"\.up_blocks\.(\d+)\.upsamplers\.0\.", r".up.\1.upsample."),
    (r"\.up_blocks\.(\d+)\.resnets\.", r".up.\1.block."),
    (r"\.conv_shortcut\.", ".nin_shortcut."),
)
"""diffusers' part of a name -> the original's."""


def original_kl_name(name: str, levels: int) -> str:
    """The original's name of a parameter of diffusers' AutoencoderKL; it counts the decoder's levels from the other end."""
    for pattern, replacement in RENAMED:
        name = re.sub(pattern, replacement, name)
    return re.sub(r"\.up\.(\d+)\.", lambda match: f".up.{levels - 1 - int(match[1])}.", name)


def older_diffusers_kl_name(name: str) -> str:
    """The name that diffusers before 0.18 gave the parameter of an attention layer."""
    for new, old in (("to_q", "query"), ("to_k", "key"), ("to_v", "value"), ("to_out.0", "proj_attn")):
        name = name.replace(f".attentions.0.{new}.", f".attentions.0.{old}.")
    return name
