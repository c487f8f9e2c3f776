"""Random models of those of ComfyUI's classes that run whole, small enough for two CPU cores."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.tiny_family import Tiny, of_class


def unet(
    channels: int, depths: tuple[int, ...], heads: int = 64, latent: int = 4, **sizes: Any
) -> Callable[[Any, Any], Any]:
    """A UNet with a transformer at each depth given, two at a scale of long ones, else one; `heads` are the features of one
    head, or -1 where there are 8."""
    blocks = 2 if len(depths) > 3 else 1
    counts = {"num_heads": 8, "num_head_channels": -1} if heads < 0 else {"num_heads": -1, "num_head_channels": heads}
    settings: dict[str, Any] = {
        "image_size": 32, "use_checkpoint": False, "use_spatial_transformer": True, "legacy": False, "in_channels": latent,
        "out_channels": 4, "model_channels": channels, "num_res_blocks": [blocks] * (len(depths) // blocks),
        "channel_mult": (1,) * (len(depths) // blocks), "transformer_depth": list(depths),
        "transformer_depth_output": ([0] * blocks + [1]) * (len(depths) // blocks),
    }  # fmt: skip
    return of_class("modules.diffusionmodules.openaimodel.UNetModel", **settings | counts | sizes)


ACE: Mapping[str, Any] = {
    "attention_head_dim": 32,
    "num_attention_heads": 3,
    "num_layers": 2,
    "max_position": 512,
    "max_width": 512,
    "lyric_encoder_vocab_size": 64,
}
"""The sizes of ACE-Step."""


def _lyrics(tokens: int) -> dict[str, Tensor]:
    return {"conditioning_lyrics": (torch.arange(tokens) * 7 % 64)[None]}


VIDEO_UNET: Mapping[str, Any] = {
    "extra_ff_mix_layer": True, "use_spatial_context": True, "merge_strategy": "learned_with_images", "merge_factor": 0.0,
    "video_kernel_size": [3, 1, 1], "use_temporal_resblock": True, "use_temporal_attention": True,
    "disable_temporal_crossattention": False,
}  # fmt: skip
"""What ComfyUI detects of Stable Video Diffusion."""


WHOLE: Mapping[str, Tiny] = {
    "sd15": Tiny(
        unet(320, (1, 1), -1, context_dim=768, use_linear_in_transformer=False, transformer_depth_middle=1),
        (4, 9, 14),
        768,
    ),
    "ace": Tiny(
        of_class("ace.model.ACEStepTransformer2DModel", inner_dim=96, mlp_ratio=2.5, **ACE),
        (8, 16, 24),
        768,
        _lyrics,
        metadata={"sizes": json.dumps(ACE)},
    ),
    "stable_audio": Tiny(
        of_class(
            "audio.dit.AudioDiffusionTransformer",
            depth=2,
            global_cond_dim=1536,
            project_global_cond=True,
            cond_token_dim=768,
            project_cond_tokens=False,
        ),
        (64, 37),
        768,
    ),
    "wide_sd15": Tiny(
        of_class(
            "modules.diffusionmodules.openaimodel.UNetModel",
            "meta",
            image_size=32,
            use_checkpoint=False,
            use_spatial_transformer=True,
            legacy=False,
            in_channels=4,
            out_channels=4,
            model_channels=320,
            num_res_blocks=[2, 2, 2, 2],
            channel_mult=(1, 2, 4, 4),
            transformer_depth=[1, 1, 1, 1, 1, 1, 0, 0],
            transformer_depth_output=[1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
            transformer_depth_middle=1,
            context_dim=768,
            use_linear_in_transformer=False,
            num_heads=8,
            num_head_channels=-1,
        ),
        (4, 9, 14),
        768,
    ),
    "sd15_scales": Tiny(  # FreeU goes by the width of a scale
        unet(
            320,
            (1, 0),
            -1,
            channel_mult=(1, 2),
            transformer_depth_output=[0, 1, 0, 0],
            context_dim=768,
            use_linear_in_transformer=False,
            transformer_depth_middle=-1,
        ),
        (4, 9, 14),
        768,
    ),
    "inpaint": Tiny(
        unet(320, (1,), -1, latent=9, context_dim=768, use_linear_in_transformer=False, transformer_depth_middle=1),
        (4, 9, 14),
        768,
    ),
    "ip2p": Tiny(
        unet(320, (1,), -1, latent=8, context_dim=768, use_linear_in_transformer=False, transformer_depth_middle=1),
        (4, 9, 14),
        768,
    ),
    "lotus": Tiny(
        unet(
            320,
            (1,),
            context_dim=1024,
            use_linear_in_transformer=True,
            transformer_depth_middle=1,
            num_classes="sequential",
            adm_in_channels=4,
        ),
        (4, 9, 14),
        1024,
    ),
    "sd20": Tiny(
        unet(320, (1, 1), context_dim=1024, use_linear_in_transformer=True, transformer_depth_middle=1),
        (4, 9, 14),
        1024,
    ),
    "sdxl_refiner": Tiny(
        unet(
            384,
            (0, 0, 4, 4, 4, 4, 0, 0),
            context_dim=1280,
            use_linear_in_transformer=True,
            transformer_depth_middle=1,
            num_classes="sequential",
            adm_in_channels=2560,
        ),
        (4, 9, 14),
        1280,
        pooled=1280,
    ),
    "svd": Tiny(
        unet(
            320,
            (1, 1, 1, 1, 1, 1, 0, 0),
            latent=8,
            context_dim=1024,
            use_linear_in_transformer=True,
            transformer_depth_middle=1,
            num_classes="sequential",
            adm_in_channels=768,
            **VIDEO_UNET,
        ),
        (4, 8, 12),
        1024,
    ),
    "hunyuan3d": Tiny(
        of_class(
            "hunyuan3d.model.Hunyuan3Dv2",
            context_in_dim=96,
            hidden_size=256,
            num_heads=16,
            depth=2,
            depth_single_blocks=2,
            guidance_embed=True,
        ),
        (64, 37),
        96,
    ),
    "hunyuan3d21": Tiny(
        of_class(
            "hunyuan3dv2_1.hunyuandit.HunYuanDiTPlain",
            hidden_size=256,
            depth=8,
            guidance_cond_proj_dim=None,
        ),
        (64, 37),
        1024,
    ),
    "sdxl": Tiny(  # KOALA, which is SDXL with fewer blocks
        unet(
            320,
            (0, 2, 5),
            context_dim=2048,
            use_linear_in_transformer=True,
            transformer_depth_middle=-1,
            num_classes="sequential",
            adm_in_channels=2816,
        ),
        (4, 9, 14),
        2048,
        pooled=1280,
    ),
}
