"""Maps the file names in ComfyUI's workflow templates to the model classes of the files.

The files are too large to read, so this table is written by hand. `tests/pack/test_templates_census.py` compares it with
ComfyUI's list of classes and with the templates' files. A file without a row is reported as unknown and never counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

CLASSES: Mapping[str, str] = MappingProxyType(
    {
        r"flux1?-?(2|\.2).*|flux2.*": "Flux2",
        r"(flux1|flux\.1)-?(fill|.*fill).*": "FluxInpaint",
        r"flux1-schnell.*": "FluxSchnell",
        r"flux1-.*": "Flux",
        r"longcat_image.*": "LongCatImage",
        r"ovis_image.*": "Flux",
        r"chroma-radiance.*": "ChromaRadiance",
        r"chroma.*": "Chroma",
        r"(qwen_image|firered-image-edit).*": "QwenImage",
        r"wan2\.2_ti2v_5b.*": "WAN22_T2V",
        r"wan2\.2_fun_inpaint_5b.*": "WAN22_T2V inpaint",
        r"wan2\.2_fun_control_5b.*": "WAN22_T2V control",
        r"wan2\.1_fun_camera.*": "WAN21_Camera",
        r"wan2\.2_fun_camera.*": "WAN22_Camera",
        r"wan2\.1_fun_control.*": "WAN21_FunControl2V",
        r"wan2\.1_fun_inp.*": "WAN21_I2V",
        r"wan2\.2_fun_control.*": "WAN21_T2V control",
        r"wan2\.2_(fun_inp|i2v).*": "WAN21_T2V image",
        r"wan2\.1_vace.*": "WAN21_Vace",
        r"wan2\.1_14b_scail_2.*": "WAN21_SCAIL2",
        r"wan2\.2_dancer.*": "WAN22_WanDancer",
        r"wan2\.2_s2v.*": "WAN22_S2V",
        r"wan_animate_2.*": "WAN_Animate2",
        r"wan2\.2_animate.*": "WAN22_Animate",
        r"humo.*": "WAN21_HuMo",
        r"causal_forcing.*": "WAN21_CausalAR_T2V",
        r"wan2[._][12][_-](i2v|flf2v).*|wan21-wanmove.*|chrono_edit.*": "WAN21_I2V",
        r"wan2\.[12]_(t2v|bernini_r).*": "WAN21_T2V",
        r"z_image.*": "ZImage",
        r"(netayume|newbie-image).*": "Lumina2",
        r"ltx-video.*": "LTXV",
        r"ltx-2.*": "LTXAV",
        r"minimax_h3.*": "MiniMaxH3",
        r"minimax_music3.*": "MiniMaxMusic3",
        r"hunyuanvideo1\.5_1080p_sr.*": "HunyuanVideo15_SR_Distilled",
        r"(hunyuanvideo1\.5|capybara).*": "HunyuanVideo15",
        r"hunyuan_video_t2v.*": "HunyuanVideo",
        r"hunyuan_?3d-dit-v2.*": "Hunyuan3Dv2",
        r"hunyuan_3d_v2\.1.*": "Hunyuan3Dv2_1",
        r"triposplat.*": "TripoSplat",
        r"kandinsky5lite_t2i.*": "Kandinsky5Image",
        r"kandinsky5lite.*": "Kandinsky5",
        r"krea2.*": "Krea2",
        r"hidream_o1.*": "HiDreamO1",
        r"hidream_(i1|e1).*": "HiDream",
        r"anima-.*": "Anima",
        r"omnigen2.*": "Omnigen2",
        r"boogu.*": "Boogu",
        r"mage_flow.*": "MageFlow",
        r"joyai_image.*": "JoyImage",
        r"ideogram4.*": "Ideogram4",
        r"lens_.*": "Lens",
        r"ernie-image.*": "ErnieImage",
        r"pid_flux1.*": "PiD",
        r"pixeldit.*": "PixelDiTT2I",
        r"seedvr2.*": "SeedVR2",
        r"void_pass.*": "CogVideoX_Inpaint",
        r"sd3.*": "SD3",
        r"ace_step_v1_.*": "ACEStep",
        r"ace_?step_v?1\.5.*": "ACEStep15",
        r"stable-audio-open.*": "StableAudio",
        r"stable_audio_3.*": "StableAudio3",
        r"lotus-depth.*": "LotusD",
        r"(dreamshaper_8|v1-5).*": "SD15",
        r"sd_xl_refiner.*": "SDXLRefiner",
        r"sd_xl.*": "SDXL",
        r"svd_.*": "SVD_img2vid",
        r"rt_detr.*": "RT_DETR_v4",
        r"sam3\.1.*": "SAM31",
        r"sdpose.*": "SD15",
    }
)
"""Pattern of a file's name in lower case -> class in comfy.supported_models; the first match counts.

If files of one class have different inputs, a further word tells them apart.
"""


def _flux(context: int = 4096, width: int = 3072, **settings: Any) -> dict[str, Any]:
    return {
        "image_model": "flux", "in_channels": 16, "out_channels": 16, "vec_in_dim": 768, "context_in_dim": context,
        "hidden_size": width, "mlp_ratio": 4.0, "num_heads": width // 128, "depth": 1, "depth_single_blocks": 1,
        "axes_dim": [16, 56, 56], "theta": 10000, "patch_size": 2, "qkv_bias": True, "guidance_embed": True,
        "txt_ids_dims": [],
    } | settings  # fmt: skip


def _wan(kind: str, channels: int, width: int = 5120, **settings: Any) -> dict[str, Any]:
    return {
        "image_model": "wan2.1", "model_type": kind, "dim": width, "out_dim": 16, "num_heads": width // 128, "ffn_dim": 13824,
        "num_layers": 1, "patch_size": (1, 2, 2), "in_dim": channels, "cross_attn_norm": True,
    } | settings  # fmt: skip


def _hunyuan(channels: int, **settings: Any) -> dict[str, Any]:
    return {
        "image_model": "hunyuan_video", "in_channels": channels, "out_channels": 16, "patch_size": [1, 2, 2], "vec_in_dim": 768,
        "context_in_dim": 4096, "hidden_size": 3072, "mlp_ratio": 4.0, "num_heads": 24, "depth": 1, "depth_single_blocks": 1,
        "axes_dim": [16, 56, 56], "theta": 256, "qkv_bias": True, "guidance_embed": True, "byt5": False, "meanflow": False,
        "use_cond_type_embedding": False, "vision_in_dim": None, "meanflow_sum": False,
    } | settings  # fmt: skip


FIFTEEN: Mapping[str, Any] = {
    "out_channels": 32, "patch_size": [1, 1, 1], "vec_in_dim": None, "context_in_dim": 3584, "hidden_size": 2048, "num_heads": 16,
    "depth_single_blocks": 0, "guidance_embed": False, "byt5": True, "use_cond_type_embedding": True, "vision_in_dim": 1152,
    "meanflow_sum": True,
}  # fmt: skip

LUMINA: Mapping[str, Any] = {
    "image_model": "lumina2", "patch_size": 2, "in_channels": 16, "dim": 2304, "cap_feat_dim": 2304, "n_layers": 2,
    "qk_norm": True, "n_heads": 24, "n_kv_heads": 8, "axes_dims": [32, 32, 32],
    "axes_lens": [300, 512, 512], "rope_theta": 10000.0, "ffn_dim_multiplier": 4.0,
}  # fmt: skip

COSMOS: Mapping[str, Any] = {
    "max_img_h": 240, "max_img_w": 240, "max_frames": 128, "in_channels": 16, "out_channels": 16, "patch_spatial": 2,
    "patch_temporal": 1, "model_channels": 2048, "concat_padding_mask": True, "crossattn_emb_channels": 1024,
    "pos_emb_cls": "rope3d", "pos_emb_learnable": True, "pos_emb_interpolation": "crop", "min_fps": 1, "max_fps": 30,
    "use_adaln_lora": True, "adaln_lora_dim": 256, "num_blocks": 28, "num_heads": 16,
}  # fmt: skip

SIZES: Mapping[str, Mapping[str, Any]] = {
        "Flux": _flux(),
        "FluxInpaint": _flux(in_channels=96),
        "FluxSchnell": _flux(guidance_embed=False),
        "LongCatImage": _flux(3584, vec_in_dim=None, guidance_embed=False, txt_ids_dims=[1, 2]),
        "Flux2": _flux(
            15360, 6144, image_model="flux2", in_channels=128, out_channels=128, vec_in_dim=None, mlp_ratio=3.0,
            axes_dim=[32] * 4, theta=2000, patch_size=1, qkv_bias=False, txt_ids_dims=[3], global_modulation=True,
            mlp_silu_act=True, ops_bias=False, default_ref_method="index", ref_index_scale=10.0,
        ),
        "Chroma": {
            **{name: value for name, value in _flux().items() if name != "guidance_embed"}, "image_model": "chroma",
            "in_channels": 64, "out_channels": 64, "in_dim": 64, "out_dim": 3072, "hidden_dim": 5120, "n_layers": 5,
            "vec_in_dim": None,
        },
        "ChromaRadiance": {
            **{name: value for name, value in _flux().items() if name != "guidance_embed"}, "image_model": "chroma_radiance",
            "in_channels": 3, "out_channels": 3, "patch_size": 16, "in_dim": 64, "out_dim": 3072, "hidden_dim": 5120,
            "n_layers": 5, "vec_in_dim": None, "nerf_hidden_size": 64, "nerf_mlp_ratio": 4, "nerf_depth": 4,
            "nerf_max_freqs": 8, "nerf_tile_size": 512, "nerf_final_head_type": "conv", "nerf_embedder_dtype": None,
            "use_x0": True, "use_sequential_txt_ids": True,
        },
        "QwenImage": {"image_model": "qwen_image", "in_channels": 64, "num_layers": 1},
        "WAN21_T2V": _wan("t2v", 16),
        "WAN21_T2V image": _wan("t2v", 36),
        "WAN21_T2V control": _wan("t2v", 52, in_dim_ref_conv=16),
        "WAN21_I2V": _wan("i2v", 36),
        "WAN21_FunControl2V": _wan("i2v", 48, in_dim_ref_conv=16),
        "WAN21_Camera": _wan("camera", 32, in_dim_control_adapter=24),
        "WAN22_Camera": _wan("camera_2.2", 36, in_dim_control_adapter=24),
        "WAN21_Vace": _wan("vace", 16, vace_in_dim=96, vace_layers=1, num_layers=2),
        "WAN21_HuMo": _wan("humo", 36),
        "WAN21_SCAIL2": _wan("scail2", 20),
        "WAN22_S2V": _wan("s2v", 16, num_layers=40),
        "WAN22_WanDancer": _wan("wandancer", 36),
        "WAN_Animate2": _wan("animate2", 36),
        "WAN22_T2V": _wan("t2v", 48, 3072, out_dim=48),
        "WAN22_T2V inpaint": _wan("t2v", 100, 3072, out_dim=48),
        "WAN22_T2V control": _wan("t2v", 148, 3072, out_dim=48, in_dim_ref_conv=48),
        "HunyuanVideo": _hunyuan(16),
        "HunyuanVideo15": _hunyuan(65, **FIFTEEN),
        "ZImage": {
            **LUMINA, "dim": 3840, "cap_feat_dim": 2560, "n_heads": 30, "n_kv_heads": 30, "axes_dims": [32, 48, 48],
            "axes_lens": [1536, 512, 512], "rope_theta": 256.0, "ffn_dim_multiplier": 8.0 / 3.0, "z_image_modulation": True,
            "time_scale": 1000.0, "pad_tokens_multiple": 32, "n_layers": 30,
        },
        "Lumina2": LUMINA,
        "LTXV": {"image_model": "ltxv", "num_layers": 1, "attention_head_dim": 64, "cross_attention_dim": 2048},
        "LTXAV": {"image_model": "ltxav", "num_layers": 1, "attention_head_dim": 128, "cross_attention_dim": 4096},
        "MiniMaxH3": {"image_model": "minimax_h3", "num_layers": 1, "token_refiner_num_layers": 1},
        "Kandinsky5": {
            "image_model": "kandinsky5", "model_dim": 1792, "axes_dims": (16, 24, 24), "num_text_blocks": 1,
            "num_visual_blocks": 1,
        },
        "Kandinsky5Image": {
            "image_model": "kandinsky5", "model_dim": 2560, "axes_dims": (32, 48, 48), "rope_scale_factor": (1.0, 1.0, 1.0),
            "visual_embed_dim": 64, "num_text_blocks": 1, "num_visual_blocks": 1,
        },
        "Krea2": {"image_model": "krea2", "layers": 1},
        "HiDream": {
            "image_model": "hidream", "attention_head_dim": 128, "axes_dims_rope": [64, 32, 32], "caption_channels": [4096, 4096],
            "max_resolution": [128, 128], "in_channels": 16, "llama_layers": [*range(31), *[31] * 17], "num_attention_heads": 20,
            "num_routed_experts": 4, "num_activated_experts": 2, "num_layers": 16, "num_single_layers": 32, "out_channels": 16,
            "patch_size": 2, "text_emb_dim": 2048,
        },
        "Anima": {"image_model": "anima", **COSMOS},
        "Omnigen2": {
            "image_model": "omnigen2", "axes_dim_rope": [40, 40, 40], "axes_lens": [1024, 1664, 1664], "hidden_size": 2520,
            "multiple_of": 256, "num_attention_heads": 21, "num_kv_heads": 7, "num_layers": 32, "num_refiner_layers": 2,
            "text_feat_dim": 2048,
        },
        "Boogu": {"image_model": "boogu", "num_layers": 1, "num_double_stream_layers": 1, "num_refiner_layers": 1},
        "MageFlow": {"image_model": "mage_flow", "num_layers": 1},
        "ErnieImage": {"image_model": "ernie"},
        "JoyImage": {"image_model": "joyimage"},
        "Ideogram4": {"image_model": "ideogram4", "num_layers": 1},
        "Lens": {"image_model": "lens", "num_layers": 1},
        "SD3": {
            "in_channels": 16, "patch_size": 2, "out_channels": 16, "depth": 38, "input_size": None, "adm_in_channels": 2048,
            "context_embedder_config": {
                "target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": 2432}
            },
            "num_patches": 36864, "pos_embed_max_size": 192, "qk_norm": "rms", "pos_embed_scaling_factor": None,
            "x_block_self_attn_layers": [],
        },
}  # fmt: skip
"""Model -> the config that ComfyUI detects from such a file's header, with as few blocks as possible; the rest is default."""

OTHERS: Mapping[str, str] = MappingProxyType(
    {
        "ACEStep": "sound",
        "ACEStep15": "sound",
        "MiniMaxMusic3": "sound",
        "StableAudio": "sound",
        "StableAudio3": "sound",
        "Hunyuan3Dv2": "3D",
        "Hunyuan3Dv2_1": "3D",
        "TripoSplat": "3D",
        "RT_DETR_v4": "detection",
        "SAM31": "segmentation",
        "SeedVR2": "upscaling",
        "PiD": "upscaling",
    }
)
"""Classes besides UNets that are no diffusion transformers for pictures or video, with their purpose."""


def class_of(file: str) -> str | None:
    """Return the class of a file's model; None if the table does not have it."""
    name = file.replace("\\", "/").rpartition("/")[2].lower()
    return next((kind for pattern, kind in CLASSES.items() if re.fullmatch(pattern, name)), None)


def file_of(widgets: Any) -> str:
    """Return the file that a loader's widgets name."""
    return str(next(iter(widgets.values()) if isinstance(widgets, dict) else iter(widgets)))


REFUSED_NODES: Mapping[str, str] = {
    "SamplerARVideo": "SamplerARVideo calls the model's blocks, which only workers have",
    "SDPoseKeypointExtractor": "SDPoseKeypointExtractor needs values inside the model (output_block_patch), which only workers "
    "have",
}
"""Nodes that an unsharded model refuses, with the reason. Their templates are not run."""
