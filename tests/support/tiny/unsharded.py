"""Random models of ComfyUI's classes that run unsharded, small enough for two CPU cores."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.support.tiny.family import Tiny, of_class
from tests.support.tiny.models import draw


def unet(
    channels: int,
    depths: tuple[int, ...],
    heads: int = 64,
    latent: int = 4,
    device: str = "cpu",
    size: tuple[int, int] = (9, 14),
    pooled: int = 0,
    **sizes: Any,
) -> Tiny:
    """Return a UNet with a transformer of each given depth, whose text has the width `context_dim`.

    Args:
        channels: channels of the model.
        depths: depths of the transformers; with more than 3 there are two blocks at each scale, else one.
        heads: width of a head, or -1 for 8 heads.
        latent: channels of the input.
        size: height and width of the latent.
        sizes: further arguments of the UNet. `adm_in_channels` is the width of the embedding besides the timestep's.
    """
    blocks = 2 if len(depths) > 3 else 1
    counts = {"num_heads": 8, "num_head_channels": -1} if heads < 0 else {"num_heads": -1, "num_head_channels": heads}
    width: int = sizes["context_dim"]
    settings: dict[str, Any] = {
        "image_size": 32, "use_checkpoint": False, "use_spatial_transformer": True, "legacy": False, "in_channels": latent,
        "out_channels": 4, "model_channels": channels, "num_res_blocks": [blocks] * (len(depths) // blocks),
        "channel_mult": (1,) * (len(depths) // blocks), "transformer_depth": list(depths), "transformer_depth_middle": 1,
        "transformer_depth_output": ([0] * blocks + [1]) * (len(depths) // blocks),
        "use_linear_in_transformer": width > 768,
    }  # fmt: skip
    if "adm_in_channels" in sizes:
        settings["num_classes"] = "sequential"
    make = of_class("modules.diffusionmodules.openaimodel.UNetModel", device, **settings | counts | sizes)
    return Tiny(make, (4, *size), width, pooled=pooled)


ACE: Mapping[str, Any] = {
    "attention_head_dim": 32,
    "num_attention_heads": 3,
    "num_layers": 2,
    "max_position": 512,
    "max_width": 512,
    "lyric_encoder_vocab_size": 64,
}
"""Sizes of ACE-Step."""


def _lyrics(tokens: int) -> dict[str, Tensor]:
    return {"conditioning_lyrics": (torch.arange(tokens) * 7 % 64)[None]}


VIDEO_UNET: Mapping[str, Any] = {
    "extra_ff_mix_layer": True, "use_spatial_context": True, "merge_strategy": "learned_with_images", "merge_factor": 0.0,
    "video_kernel_size": [3, 1, 1], "use_temporal_resblock": True, "use_temporal_attention": True,
    "disable_temporal_crossattention": False,
}  # fmt: skip
"""Settings that ComfyUI detects for Stable Video Diffusion."""


def sized(kind: str, path: str, sizes: Mapping[str, Any], *given: Any, **more: Any) -> Tiny:
    """Return a model whose sizes ComfyUI assumes, for a copy of ComfyUI that reads class and sizes from the file."""
    metadata = {"class": kind, "sizes": json.dumps(sizes)}
    return replace(Tiny(of_class(path, **sizes), *given, **more), metadata=metadata)


CASCADE_C: Mapping[str, Any] = {
    "stable_cascade_stage": "c", "c_cond": 64, "c_hidden": [64, 64], "nhead": [2, 2], "blocks": [[1, 2], [2, 1]],
}  # fmt: skip
CASCADE_B: Mapping[str, Any] = {
    "stable_cascade_stage": "b", "c_cond": 64, "c_hidden": [32, 64], "nhead": [-1, 2], "blocks": [[1, 2], [2, 1]],
    "block_repeat": [[1, 1], [2, 2]], "level_config": ["CT", "CTA"], "dropout": [0, 0.0],
}  # fmt: skip
HUNYUAN_DIT: Mapping[str, Any] = {
    "image_model": "hydit", "hidden_size": 384, "depth": 4, "text_len": 5, "text_len_t5": 6, "text_states_dim": 48,
    "text_states_dim_t5": 64,
}  # fmt: skip
COSMOS: Mapping[str, Any] = {
    "image_model": "cosmos", "max_img_h": 240, "max_img_w": 240, "max_frames": 128, "out_channels": 16, "patch_spatial": 2,
    "patch_temporal": 1, "model_channels": 192, "block_config": "FA-CA-MLP", "concat_padding_mask": True,
    "pos_emb_cls": "rope3d", "pos_emb_learnable": False, "pos_emb_interpolation": "crop", "block_x_format": "THWBD",
    "affline_emb_norm": True, "use_adaln_lora": True, "adaln_lora_dim": 16, "num_blocks": 2, "num_heads": 3,
    "extra_per_block_abs_pos_emb": True, "rope_t_extrapolation_ratio": 2.0, "extra_per_block_abs_pos_emb_type": "learnable",
}  # fmt: skip
Z_IMAGE_PIXEL: Mapping[str, Any] = {
    "image_model": "zimage_pixel", "patch_size": 4, "in_channels": 3, "dim": 288, "n_layers": 2, "n_heads": 3, "n_kv_heads": 3,
    "cap_feat_dim": 64, "qk_norm": True, "axes_dims": [32, 32, 32], "axes_lens": [300, 512, 512], "rope_theta": 256.0,
    "ffn_dim_multiplier": 1.0, "z_image_modulation": True, "time_scale": 1000.0, "pad_tokens_multiple": 32,
    "decoder_hidden_size": 48, "decoder_num_res_blocks": 2, "decoder_max_freqs": 4, "decoder_in_channels": 48,
}  # fmt: skip
PIXEL_DIT: Mapping[str, Any] = {
    "image_model": "pixeldit_t2i", "num_groups": 3, "hidden_size": 192, "pixel_hidden_size": 8, "pixel_attn_hidden_size": 64,
    "pixel_num_groups": 2, "patch_depth": 3, "pixel_depth": 2, "patch_size": 4, "txt_embed_dim": 48,
}  # fmt: skip
PID: Mapping[str, Any] = {
    **PIXEL_DIT, "image_model": "pid", "patch_size": 16, "lq_hidden_dim": 32, "lq_num_res_blocks": 1, "lq_interval": 2,
}  # fmt: skip
TRIPOSPLAT: Mapping[str, Any] = {
    "image_model": "triposplat", "q_token_length": 37, "model_channels": 128, "cond_channels": 48, "num_blocks": 2,
    "num_refiner_blocks": 1, "cond2_channels": 16,
}  # fmt: skip
HIDREAM_O1: Mapping[str, Any] = {
    "image_model": "hidream_o1",
    "text_config_overrides": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 128,
    },
    "vision_config_overrides": {"hidden_size": 64, "num_heads": 4, "intermediate_size": 96, "depth": 2},
}  # fmt: skip
ACE15: Mapping[str, Any] = {
    "audio_model": "ace1.5", "hidden_size": 128, "intermediate_size": 192, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32,
    "encoder_hidden_size": 128, "encoder_num_heads": 4, "encoder_intermediate_size": 192, "num_dit_layers": 2,
    "num_lyric_layers": 1, "num_timbre_layers": 1, "num_tokenizer_layers": 1, "text_hidden_dim": 48, "fsq_dim": 128,
    "sliding_window": 8,
}  # fmt: skip


SEEDVR2: Mapping[str, Any] = {
    "image_model": "seedvr2", "vid_dim": 256, "heads": 2, "num_layers": 2, "mm_layers": 1, "norm_eps": 1e-5,
    "mlp_type": "swiglu", "vid_out_norm": True, "expand_ratio": 1,
}  # fmt: skip
TRELLIS2: Mapping[str, Any] = {
    "image_model": "trellis2", "resolution": 64, "model_channels": 128, "cond_channels": 48, "num_blocks": 2, "num_heads": 2,
    "init_txt_model": True,
}  # fmt: skip


def _words_of_two(tokens: int) -> dict[str, Tensor]:
    """Return the inputs of HunyuanDiT besides its text: two masks and T5's text."""
    masks = {"attention_mask": torch.ones(1, 5), "attention_mask_mt5xl": (torch.arange(6) < tokens)[None].float()}
    return masks | {"conditioning_mt5xl": draw(1, 6, 64, seed=tokens)}


def _ids(tokens: int) -> dict[str, Tensor]:
    """Return the token ids of a prompt. The last id is the token that stands for the time."""
    return {"text_input_ids": torch.tensor([[*range(900, 900 + 3 * tokens), 151673]])}


def _song(tokens: int) -> dict[str, Tensor]:
    return {"conditioning_lyrics": draw(1, 2 * tokens, 48, seed=tokens)}


def video_unet(width: int) -> Tiny:
    """Return a UNet whose frames are a batch. `width` is the width of the embedding of the motion."""
    depths = (1, 1, 1, 1, 1, 1, 0, 0)
    return unet(320, depths, latent=8, size=(8, 12), context_dim=1024, adm_in_channels=width, **VIDEO_UNET)


UNSHARDED: Mapping[str, Tiny] = {
    "unclip_l": unet(320, (1, 1), context_dim=1024, adm_in_channels=1536),  # an embedding and its noise level
    "unclip_h": unet(320, (1, 1), context_dim=1024, adm_in_channels=2048),
    "sv3d_u": video_unet(256),
    "sv3d_p": video_unet(1280),
    "x4": unet(
        256,
        (0, 0, 1, 1, 1, 1, 1, 1),
        -1,
        latent=7,
        size=(16, 24),
        context_dim=1024,
        num_classes=1000,
        disable_self_attentions=[True, True, True, False],
    ),
    "cascade_c": sized("Stable_Cascade_C", "cascade.stage_c.StageC", CASCADE_C, (16, 9, 14), 1280, pooled=1280),
    "cascade_b": sized("Stable_Cascade_B", "cascade.stage_b.StageB", CASCADE_B, (4, 12, 20), 1280, pooled=1280),
    "hunyuan_dit": sized("HunyuanDiT", "hydit.models.HunYuanDiT", HUNYUAN_DIT, (4, 8, 14), 48, _words_of_two, tokens=5),
    "cosmos_t2v": sized("CosmosT2V", "cosmos.model.GeneralDIT", {**COSMOS, "in_channels": 16}, (16, 3, 8, 10), 1024),
    "cosmos_i2v_whole": sized(
        "CosmosI2V", "cosmos.model.GeneralDIT", {**COSMOS, "in_channels": 17}, (16, 3, 8, 10), 1024
    ),
    "z_image_pixel": sized("ZImagePixelSpace", "lumina.model.NextDiTPixelSpace", Z_IMAGE_PIXEL, (3, 36, 56), 64),
    "pixel_dit": sized("PixelDiTT2I", "pixeldit.model.PixDiT_T2I", PIXEL_DIT, (3, 36, 56), 48),
    "pid": sized("PiD", "pixeldit.pid.PidNet", PID, (3, 64, 96), 48),
    "hidream_o1": sized("HiDreamO1", "hidream_o1.model.HiDreamO1Transformer", HIDREAM_O1, (3, 64, 96), 64, _ids),
    "ace15": sized("ACEStep15", "ace.ace_step15.AceStepConditionGenerationModel", ACE15, (64, 40), 48, _song),
    "triposplat": sized("TripoSplat", "triposplat.model.LatentSeqMMFlowModel", TRIPOSPLAT, (37, 16), 48),
    "seedvr2": sized("SeedVR2", "seedvr.model.NaDiT", SEEDVR2, (16, 3, 8, 10), 5120),
    "trellis2": sized("Trellis2", "trellis2.model.Trellis2", TRELLIS2, (32, 16, 16, 16), 48, tokens=7),
    "stable_audio3": Tiny(
        of_class(
            "audio.dit.AudioDiffusionTransformer",
            depth=2,
            io_channels=256,
            embed_dim=192,
            num_heads=6,
            global_cond_dim=768,
            project_global_cond=True,
            cond_token_dim=768,
            project_cond_tokens=True,
            global_cond_type="adaLN",
            global_cond_shared_embed=True,
            local_add_cond_dim=257,
            num_memory_tokens=3,
            attn_kwargs={"qk_norm": "rms", "differential": False},
            norm_type="rms_norm",
            timestep_features_type="expo",
        ),
        (256, 20),
        768,
    ),
    "cogvideox_inpaint": Tiny(
        of_class(
            "cogvideo.model.CogVideoXTransformer3DModel",
            num_attention_heads=3,
            in_channels=48,
            time_embed_dim=64,
            text_embed_dim=48,
            num_layers=2,
            use_rotary_positional_embeddings=True,
        ),
        (16, 3, 8, 10),
        48,
    ),
    "causal_wan": Tiny(
        of_class("wan.ar_model.CausalWanModel", dim=384, ffn_dim=256, num_heads=3, num_layers=2, cross_attn_norm=True),
        (16, 3, 8, 10),
        4096,
        metadata={"config": json.dumps({"transformer": {"causal_ar": True}})},
    ),
    "sd15": unet(320, (1, 1), -1, context_dim=768),
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
    "wide_sd15": unet(
        320,
        (1, 1, 1, 1, 1, 1, 0, 0),
        -1,
        device="meta",
        channel_mult=(1, 2, 4, 4),
        transformer_depth_output=[1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
        context_dim=768,
    ),
    "wide_sdxl": unet(  # the published size: 2.6 billion parameters
        320,
        (0, 0, 2, 2, 10, 10),
        device="meta",
        size=(8, 10),
        pooled=1280,
        channel_mult=(1, 2, 4),
        transformer_depth_middle=10,
        transformer_depth_output=[0, 0, 0, 2, 2, 2, 10, 10, 10],
        context_dim=2048,
        adm_in_channels=2816,
    ),
    "sd15_scales": unet(  # FreeU depends on the width of a scale
        320,
        (1, 0),
        -1,
        channel_mult=(1, 2),
        transformer_depth_middle=-1,
        transformer_depth_output=[0, 1, 0, 0],
        context_dim=768,
    ),
    "inpaint": unet(320, (1,), -1, latent=9, context_dim=768),
    "ip2p": unet(320, (1,), -1, latent=8, context_dim=768),
    "lotus": unet(320, (1,), context_dim=1024, adm_in_channels=4),
    "sd20": unet(320, (1, 1), context_dim=1024),
    "sdxl_refiner": unet(384, (0, 0, 4, 4, 4, 4, 0, 0), pooled=1280, context_dim=1280, adm_in_channels=2560),
    "svd": video_unet(768),
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
    "sdxl": unet(  # KOALA: SDXL with fewer blocks
        320,
        (0, 2, 5),
        pooled=1280,
        transformer_depth_middle=-1,
        context_dim=2048,
        adm_in_channels=2816,
    ),
}
