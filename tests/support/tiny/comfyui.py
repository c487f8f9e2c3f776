"""Random models of ComfyUI's own classes, small enough for two CPU cores, and prompts for them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.comfy_oracle import comfy_on_path
from tests.support.tiny.family import Tiny, layer_settings, of_class
from tests.support.tiny.models import draw, randomise
from tests.support.tiny.whole import WHOLE

HEADS = 3
"""Odd, so that no even degree divides them."""


def save_tiny(folder: Path, name: str, seed: int | None = None) -> Path:
    """Write a family's model; by its name's length unless a seed is given."""
    comfy_on_path()
    import comfy.ops

    model = TINY[name].make(torch, comfy.ops.disable_weight_init)
    seed = len(name) if seed is None else seed
    path = folder / f"{name}.safetensors"
    if next(model.parameters()).is_meta:
        return save_fp8(path, model, seed)
    randomise(model, seed)
    save_file({key: tensor.contiguous() for key, tensor in model.state_dict().items()}, path, TINY[name].metadata)
    return path


def save_wide(folder: Path, name: str) -> Path:
    """Write a model of one of the families whose width ComfyUI takes to be the real one: one block of a kind, in fp8."""
    comfy_on_path()
    import comfy.ops

    return save_fp8(folder / f"{name}.safetensors", WIDE[name](comfy.ops.disable_weight_init), seed=len(name))


def save_unread(folder: Path, name: str, **settings: Any) -> Path:
    """Write such a model under the name `NAME-unread` for tests that read no weight: no byte of them is on the disk."""
    comfy_on_path()
    import comfy.ops

    header: dict[str, Any] = {}
    end = 0
    for key, tensor in WIDE[name](comfy.ops.disable_weight_init, **settings).state_dict().items():
        begin, end = end, end + tensor.numel()
        header[key] = {"dtype": "F8_E4M3", "shape": [*tensor.shape], "data_offsets": [begin, end]}
    content = json.dumps(header).encode()
    path = folder / f"{name}-unread.safetensors"
    path.write_bytes(len(content).to_bytes(8, "little") + content)
    os.truncate(path, path.stat().st_size + end)
    return path


def save_fp8(path: Path, model: Any, seed: int, prefix: str = "") -> Path:
    """Write a model on the meta device with random weights in fp8, vectors in bf16.

    Its numbers are the same million again and again, as drawing hundreds of millions takes long.

    Args:
        prefix: before the tensors' names.
    """
    drawn = draw(1_000_003, seed=seed)  # a prime, so that no two rows are alike
    tensors: dict[str, Tensor] = {}
    for key, parameter in model.state_dict().items():
        count = parameter.numel()
        values = drawn.repeat(-(-count // len(drawn)))[:count].view(parameter.shape)
        if parameter.ndim == 1:
            tensors[prefix + key] = (1 + 0.2 * values if key.endswith("weight") else 0.1 * values).bfloat16()
        else:
            tensors[prefix + key] = (values / parameter.shape[1] ** 0.5).to(torch.float8_e4m3fn)
    path.parent.mkdir(exist_ok=True)
    save_file(tensors, path)
    return path


def _wide_qwen(operations: Any, blocks: int = 1) -> Any:
    from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(num_layers=blocks, **layer_settings(operations, "meta"))


def _wide_radiance(operations: Any) -> Any:
    sizes = {"hidden_dim": 5120, "n_layers": 5, "out_dim": 3072}
    return _radiance(24, sizes, layer_settings(operations, "meta"))


def _radiance(heads: int, sizes: Mapping[str, int], settings: Mapping[str, Any]) -> Any:
    from comfy.ldm.chroma_radiance.model import ChromaRadiance

    return ChromaRadiance(
        in_channels=3, out_channels=3, context_in_dim=64, hidden_size=heads * 128, mlp_ratio=4.0, num_heads=heads, depth=1,
        depth_single_blocks=1, axes_dim=[16, 56, 56], theta=10000, patch_size=16, qkv_bias=True, in_dim=64, txt_ids_dims=[],
        vec_in_dim=None, nerf_hidden_size=64, nerf_mlp_ratio=4, nerf_depth=4, nerf_max_freqs=8, nerf_tile_size=512,
        nerf_final_head_type="conv", nerf_embedder_dtype=torch.float32, use_x0=False, use_sequential_txt_ids=False,
        **sizes, **settings,
    )  # fmt: skip


def _wide_z_image(operations: Any) -> Any:
    from comfy.ldm.lumina.model import NextDiT

    return NextDiT(
        patch_size=2, in_channels=16, dim=3840, n_layers=1, n_heads=30, n_kv_heads=30, cap_feat_dim=64, qk_norm=True,
        axes_dims=[32, 48, 48], axes_lens=[1536, 512, 512], rope_theta=256.0, ffn_dim_multiplier=8.0 / 3.0,
        z_image_modulation=True, time_scale=1000.0, pad_tokens_multiple=32, **layer_settings(operations, "meta"),
    )  # fmt: skip


def _wide_chroma(operations: Any) -> Any:
    from comfy.ldm.chroma.model import Chroma

    return Chroma(
        in_channels=64, out_channels=64, context_in_dim=4096, hidden_size=3072, mlp_ratio=4.0, num_heads=24, depth=1,
        depth_single_blocks=1, axes_dim=[16, 56, 56], theta=10000, patch_size=2, qkv_bias=True, in_dim=64, out_dim=3072,
        hidden_dim=5120, n_layers=5, txt_ids_dims=[], vec_in_dim=None, **layer_settings(operations, "meta"),
    )  # fmt: skip


def _anima(_: Any, operations: Any) -> Any:
    """Whose text adapter alone is wide."""
    from comfy.ldm.anima.model import Anima

    return Anima(
        max_img_h=240, max_img_w=240, max_frames=128, in_channels=16, out_channels=16, patch_spatial=2, patch_temporal=1,
        model_channels=256, pos_emb_cls="rope3d", use_adaln_lora=True, adaln_lora_dim=256,
        **layer_settings(operations, "meta"),
    )  # fmt: skip


def _trellis2(operations: Any) -> Any:
    """Of newer ComfyUIs."""
    from comfy.ldm.trellis2.model import Trellis2

    return Trellis2(64, init_txt_model=True, **layer_settings(operations, "meta"))


WIDE: Mapping[str, Callable[..., Any]] = {
    "wide_qwen": _wide_qwen,
    "wide_z_image": _wide_z_image,
    "wide_radiance": _wide_radiance,
    "wide_chroma": _wide_chroma,
    "trellis2": _trellis2,
}


def _flux2(_: Any, operations: Any) -> Any:
    from comfy.ldm.flux.model import Flux

    return Flux(
        in_channels=128, out_channels=128, vec_in_dim=None, context_in_dim=48, hidden_size=HEADS * 128, mlp_ratio=3.0,
        num_heads=HEADS, depth=1, depth_single_blocks=2, axes_dim=[32, 32, 32, 32], theta=2000, patch_size=1, qkv_bias=False,
        guidance_embed=True, txt_ids_dims=[3], global_modulation=True, mlp_silu_act=True, ops_bias=False,
        default_ref_method="index", ref_index_scale=10.0, **layer_settings(operations),
    )  # fmt: skip


def _longcat(_: Any, operations: Any) -> Any:
    from comfy.ldm.flux.model import Flux

    return Flux(
        in_channels=16, out_channels=16, vec_in_dim=None, context_in_dim=3584, hidden_size=HEADS * 128, mlp_ratio=4.0,
        num_heads=HEADS, depth=2, depth_single_blocks=2, axes_dim=[16, 56, 56], theta=10000, patch_size=2, qkv_bias=True,
        guidance_embed=False, txt_ids_dims=[1, 2], **layer_settings(operations),
    )  # fmt: skip


def _ovis(_: Any, operations: Any) -> Any:
    from comfy.ldm.flux.model import Flux

    return Flux(
        in_channels=16, out_channels=16, vec_in_dim=None, context_in_dim=2048, hidden_size=HEADS * 128, mlp_ratio=4.0,
        num_heads=HEADS, depth=2, depth_single_blocks=2, axes_dim=[16, 56, 56], theta=10000, patch_size=2, qkv_bias=True,
        guidance_embed=False, txt_ids_dims=[1, 2], yak_mlp=True, txt_norm=True, **layer_settings(operations),
    )  # fmt: skip


def _wan(kind: str = "t2v", channels: int = 16, image: int = 0, heads: int = HEADS) -> Callable[[Any, Any], Any]:
    def make(_: Any, operations: Any) -> Any:
        from comfy.ldm.wan.model import WanModel

        return WanModel(
            model_type=kind, in_dim=channels + image, out_dim=channels, dim=heads * 128, ffn_dim=256, text_dim=4096,
            num_heads=heads, num_layers=3, cross_attn_norm=True, **layer_settings(operations),
        )  # fmt: skip

    return make


def _vace(_: Any, operations: Any) -> Any:
    from comfy.ldm.wan.model import VaceWanModel

    return VaceWanModel(
        dim=HEADS * 128, ffn_dim=256, text_dim=4096, num_heads=HEADS, num_layers=4, vace_layers=2, vace_in_dim=96,
        cross_attn_norm=True, **layer_settings(operations),
    )  # fmt: skip


def _over_wan(kind: str, module: str = "model", **sizes: Any) -> Callable[[Any, Any], Any]:
    def make(_: Any, operations: Any) -> Any:
        return getattr(import_module(f"comfy.ldm.wan.{module}"), kind)(
            dim=HEADS * 128, ffn_dim=256, text_dim=4096, num_heads=HEADS, cross_attn_norm=True,
            **{"num_layers": 2} | sizes, **layer_settings(operations),
        )  # fmt: skip

    return make


def _hunyuan(channels: int = 16, **sizes: Any) -> Callable[[Any, Any], Any]:
    def make(_: Any, operations: Any) -> Any:
        from comfy.ldm.hunyuan_video.model import HunyuanVideo

        video = {
            "vec_in_dim": 768, "context_in_dim": 4096, "patch_size": [1, 2, 2], "axes_dim": [16, 56, 56],
            "out_channels": 16, "depth": 2, "depth_single_blocks": 2, "guidance_embed": True, "byt5": False, "meanflow": False,
            "use_cond_type_embedding": False, "vision_in_dim": None, "meanflow_sum": False,
        }  # fmt: skip
        return HunyuanVideo(
            in_channels=channels, hidden_size=HEADS * 128, mlp_ratio=4.0, num_heads=HEADS, theta=256, qkv_bias=True,
            **video | sizes, **layer_settings(operations),
        )  # fmt: skip

    return make


HUNYUAN_IMAGE: Mapping[str, Any] = {
    "vec_in_dim": None, "context_in_dim": 3584, "patch_size": [1, 1], "axes_dim": [64, 64], "out_channels": 64,
    "guidance_embed": False, "byt5": True,
}  # fmt: skip
HUNYUAN15: Mapping[str, Any] = {
    "vec_in_dim": None, "context_in_dim": 48, "patch_size": [1, 1, 1], "out_channels": 32, "depth_single_blocks": 0,
    "guidance_embed": False, "byt5": True, "use_cond_type_embedding": True, "vision_in_dim": 1152, "meanflow_sum": True,
}  # fmt: skip
REFINER: Mapping[str, Any] = {
    "vec_in_dim": None, "context_in_dim": 48, "patch_size": [1, 1, 1], "out_channels": 64, "depth": 1,
    "guidance_embed": False,
}  # fmt: skip


def _cosmos(channels: int) -> Callable[[Any, Any], Any]:
    """Of ten blocks and sixteen heads, which ComfyUI takes those of an unknown width to have."""

    def make(_: Any, operations: Any) -> Any:
        from comfy.ldm.cosmos.predict2 import MiniTrainDIT

        return MiniTrainDIT(
            max_img_h=240, max_img_w=240, max_frames=128, in_channels=channels, out_channels=16, patch_spatial=2,
            patch_temporal=1, model_channels=256, pos_emb_cls="rope3d", pos_emb_learnable=True, min_fps=1, max_fps=30,
            use_adaln_lora=True, adaln_lora_dim=256, **layer_settings(operations),
        )  # fmt: skip

    return make


def _lumina(width: int, sizes: Mapping[str, Any], device: str = "cpu") -> Callable[[Any, Any], Any]:
    def make(_: Any, operations: Any) -> Any:
        from comfy.ldm.lumina.model import NextDiT

        return NextDiT(
            patch_size=2, in_channels=16, dim=width, n_layers=2, cap_feat_dim=2304, qk_norm=True, **sizes,
            **layer_settings(operations, device),
        )  # fmt: skip

    return make


def _shown(tokens: int) -> Mapping[str, Any]:
    """The mask of a text that is not padded."""
    return {"attention_mask": torch.ones(1, tokens, dtype=torch.int64)}


def _padded(tokens: int) -> Mapping[str, Any]:
    """The mask of a text whose last two tokens are padding."""
    return {"attention_mask": (torch.arange(tokens) < tokens - 2).long()[None]}


def _words(tokens: int) -> Mapping[str, Any]:
    """What Anima's adapter puts in the place of the text: words of another vocabulary, and what each weighs."""
    return {"t5xxl_ids": torch.arange(tokens) + 5, "t5xxl_weights": torch.linspace(0.5, 1.5, tokens)}


def _speech(tokens: int) -> Mapping[str, Any]:
    """What HuMo takes beside every text: sound of three frames."""
    return {"audio_embed": draw(1, 3, 8, 5, 1280, seed=tokens)}


def _krea2(_: Any, operations: Any) -> Any:
    from comfy.ldm.krea2.model import SingleStreamDiT

    return SingleStreamDiT(
        features=HEADS * 128,
        txtdim=40,
        heads=HEADS,
        kvheads=1,
        multiplier=4,
        layers=3,
        txtlayers=2,
        **layer_settings(operations),
    )


def _sd3(_: Any, operations: Any) -> Any:
    """3.5 medium, whose positions are a table in the file."""
    from comfy.ldm.modules.diffusionmodules.mmdit import OpenAISignatureMMDITWrapper

    model = OpenAISignatureMMDITWrapper(
        input_size=None, in_channels=16, depth=HEADS, pos_embed_max_size=8, num_patches=64, qk_norm="rms",
        adm_in_channels=2048, x_block_self_attn_layers=[0, 1],
        context_embedder_config={
            "target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": HEADS * 64}
        },
        **layer_settings(operations),
    )  # fmt: skip
    model.pos_embed.copy_(draw(*model.pos_embed.shape, seed=6))
    return model


def _minimax(**settings: Any) -> Callable[[Any, Any], Any]:
    def make(_: Any, operations: Any) -> Any:
        from comfy.ldm.minimax.model import MiniMaxH3Model

        model = MiniMaxH3Model(
            hidden_size=HEADS * 128, num_layers=3, token_refiner_num_layers=2, num_attention_heads=HEADS,
            ffn_hidden_size=128, text_dim=40, timestep_input_dim=32, time_embed_hidden_size=64, time_embed_dim=64,
            **settings, **layer_settings(operations),
        )  # fmt: skip
        model.rope.inv_freq.copy_(100 ** -torch.linspace(0, 1, 16))
        if model.use_adaln_curves:
            model.adaln_t_table.copy_(draw(*model.adaln_t_table.shape, seed=7))
        return model

    return make


KANDINSKY: Mapping[str, Any] = {"time_dim": 64, "ff_dim": 256, "num_text_blocks": 1}
HIDREAM: dict[str, Any] = {
    "attention_head_dim": 32,
    "num_attention_heads": HEADS,
    "axes_dims_rope": [16, 8, 8],
    "num_layers": 2,
    "num_single_layers": 2,
    "llama_layers": [0, 2, 1, 2],
}
MOCHI: dict[str, Any] = {
    "hidden_size_x": HEADS * 32,
    "hidden_size_y": 48,
    "depth": 3,
    "num_heads": HEADS,
    "mlp_ratio_x": 128.0,  # its class insists on the width inside its feed-forward layers
    "mlp_ratio_y": 2.0,
}
LUMINA: dict[str, Any] = {
    "n_heads": HEADS,
    "n_kv_heads": 1,
    "axes_dims": [32, 32, 32],
    "axes_lens": [300, 512, 512],
    "rope_theta": 10000.0,
    "ffn_dim_multiplier": 1.0,
}
WIDE_LUMINA = LUMINA | {"n_heads": 24, "n_kv_heads": 8, "ffn_dim_multiplier": 4.0}
RADIANCE: dict[str, Any] = {"hidden_dim": 64, "n_layers": 1, "out_dim": HEADS * 128}
ROPE = [8, 12, 12]
"""The channels of a head of 32."""

BOOGU: dict[str, Any] = {
    "num_attention_heads": 2 * HEADS,
    "num_kv_heads": HEADS,
    "multiple_of": 64,
    "axes_dim_rope": ROPE,
}
OMNIGEN2: dict[str, Any] = BOOGU | {
    "hidden_size": HEADS * 64,
    "num_layers": 2,
    "num_refiner_layers": 2,
    "text_feat_dim": 48,
    "timestep_scale": 1000.0,
}
ERNIE: dict[str, Any] = {
    "hidden_size": HEADS * 32,
    "num_attention_heads": HEADS,
    "num_layers": 3,
    "ffn_hidden_size": 256,
    "text_in_dim": 48,
    "rope_axes_dim": ROPE,
}
AURAFLOW: dict[str, Any] = {"dim": HEADS * 32, "n_heads": HEADS, "global_conddim": 64}
IDEOGRAM: dict[str, Any] = {
    "num_attention_heads": HEADS,
    "attention_head_dim": 32,
    "intermediate_size": 128,
    "adaln_dim": 32,
    "llm_features_dim": 48,
    "mrope_section": [6, 5, 5],
}
MAGE_FLOW: dict[str, Any] = {"num_attention_heads": HEADS, "attention_head_dim": 32, "axes_dims_rope": ROPE}
"""Sizes that ComfyUI takes for granted: a file says others, and host/test_comfy_sized.py has a ComfyUI that reads them."""


def _mochi(_: Any, operations: Any) -> Any:
    from comfy.ldm.genmo.joint_model.asymm_models_joint import AsymmDiTJoint

    return AsymmDiTJoint(
        patch_size=2, in_channels=12, learn_sigma=False, qk_norm=True, qkv_bias=False, posenc_preserve_area=True,
        timestep_scale=1000.0, use_t5=True, **MOCHI, **layer_settings(operations),
    )  # fmt: skip


LTXV: dict[str, Any] = {
    "num_attention_heads": HEADS,
    "attention_head_dim": 32,
    "cross_attention_dim": HEADS * 32,
    "caption_channels": 48,
    "num_layers": 2,
    "causal_temporal_positioning": True,
}
"""What a file of LTX-Video says of itself in its metadata."""

LTXAV = {
    "num_attention_heads": 32,
    "attention_head_dim": 4,
    "cross_attention_dim": 128,
    "audio_num_attention_heads": 3,
    "audio_attention_head_dim": 32,
    "audio_cross_attention_dim": 96,
    "caption_channels": 48,
    "connector_num_layers": 1,
    "connector_attention_head_dim": 16,
    "connector_num_attention_heads": 3,
    "audio_connector_num_attention_heads": 3,
}
"""The same of LTX-2."""


LTXAV23 = LTXAV | {
    "cross_attention_adaln": True,
    "apply_gated_attention": True,
    "connector_apply_gated_attention": True,
    "caption_proj_before_connector": True,
    "caption_projection_first_linear": False,
    "rope_type": "split",
    "use_middle_indices_grid": True,
    "connector_attention_head_dim": 32,
    "connector_num_attention_heads": 4,
}
"""The same for LTX-2.3, whose text has the widths of the video's and of the sound's."""


def _ltxav(config: Mapping[str, Any], text: int) -> Tiny:
    make = of_class("lightricks.av_model.LTXAVModel", num_layers=2, **config)
    return Tiny(make, (), text, metadata={"config": json.dumps({"transformer": config})})


TINY: Mapping[str, Tiny] = {
    **WHOLE,
    "minimax": Tiny(_minimax(), (), 40),
    "minimax_curves": Tiny(_minimax(adaln_curve_grid=16), (), 40),
    "ltxav": _ltxav(LTXAV, 48),
    "ltxav23": _ltxav(LTXAV23, 128 + 96),
    "ltxv": Tiny(
        of_class("lightricks.model.LTXVModel", **LTXV),
        (128, 3, 4, 5),
        48,
        _padded,
        metadata={"config": json.dumps({"transformer": LTXV})},
    ),
    "flux2": Tiny(_flux2, (128, 7, 5), 48),
    "wan": Tiny(_wan(), (16, 3, 8, 10), 4096),
    "wan_i2v": Tiny(_wan("i2v", image=20), (16, 3, 8, 10), 4096),
    "wan_talk": Tiny(_wan("i2v", image=20, heads=5), (16, 3, 8, 10), 4096),
    "wan22_5b": Tiny(_wan(channels=48), (48, 3, 8, 10), 4096),
    "scail": Tiny(_over_wan("SCAILWanModel"), (16, 3, 8, 10), 4096),
    "scail2": Tiny(_over_wan("SCAIL2WanModel"), (16, 3, 8, 10), 4096),
    "fun_control": Tiny(_wan("i2v", image=32), (16, 3, 8, 10), 4096),
    "s2v": Tiny(_over_wan("WanModel_S2V"), (16, 3, 8, 10), 4096),
    "dancer": Tiny(_over_wan("WanDancerModel", "model_wandancer", in_dim=36), (16, 3, 8, 12), 4096),
    "vace": Tiny(_vace, (16, 3, 8, 10), 4096),
    "flow_rvs": Tiny(
        _wan(), (16, 3, 8, 10), 4096, metadata={"config": json.dumps({"transformer": {"model_type": "flow_rvs"}})}
    ),
    "wan_animate2": Tiny(  # of newer ComfyUIs
        _over_wan("WanAnimate2Model", "model_animate2", in_dim=36),
        (16, 4, 8, 10),
        4096,
        metadata={"config": json.dumps({"transformer": {"model_type": "animate2"}})},
    ),
    "ovis": Tiny(_ovis, (16, 9, 14), 2048),
    "lens": Tiny(
        of_class("lens.model.LensTransformer2DModel", num_layers=3, num_attention_heads=HEADS),
        (128, 5, 7),
        4 * 2880,
        _shown,
    ),
    "joyimage": Tiny(
        of_class(
            "joyimage.model.JoyImageTransformer3DModel",
            hidden_size=HEADS * 128,
            num_attention_heads=HEADS,
            num_layers=3,
            theta=10000,
        ),
        (16, 1, 9, 14),
        4096,
    ),
    "longcat": Tiny(_longcat, (16, 9, 14), 3584),
    "hunyuan": Tiny(_hunyuan(), (16, 3, 8, 10), 4096, pooled=768),
    "hunyuan_i2v": Tiny(_hunyuan(33), (16, 3, 8, 10), 4096, pooled=768),
    "skyreels": Tiny(_hunyuan(32), (16, 3, 8, 10), 4096, pooled=768),
    "hunyuan_image": Tiny(_hunyuan(64, **HUNYUAN_IMAGE), (64, 9, 7), 3584),
    "hunyuan15": Tiny(_hunyuan(65, **HUNYUAN15), (32, 3, 4, 5), 48, pooled=768),
    "meanflow": Tiny(_hunyuan(98, **{**HUNYUAN15, "meanflow": True}), (32, 3, 4, 5), 48, pooled=768),
    "refiner": Tiny(_hunyuan(128, **REFINER), (32, 1, 8, 10), 48, _padded, pooled=768),
    "cosmos": Tiny(_cosmos(16), (16, 1, 8, 10), 1024),
    "cosmos_i2v": Tiny(_cosmos(17), (16, 3, 8, 10), 1024),
    "hidream": Tiny(
        of_class(
            "hidream.model.HiDreamImageTransformer2DModel",
            patch_size=2,
            in_channels=16,
            caption_channels=[4096, 4096],
            **HIDREAM,
        ),
        (16, 10, 14),
        4096,
        lambda tokens: {"conditioning_llama3": draw(1, 3, tokens, 4096, seed=tokens)},
        pooled=2048,
        metadata={"sizes": json.dumps(HIDREAM)},
    ),
    "mochi": Tiny(
        _mochi,
        (12, 3, 8, 10),
        4096,
        _padded,
        metadata={"sizes": json.dumps(MOCHI)},
    ),
    "camera": Tiny(
        _over_wan("CameraWanModel", model_type="camera", in_dim=32, in_dim_control_adapter=24), (16, 3, 8, 10), 4096
    ),
    "camera22": Tiny(
        _over_wan("CameraWanModel", model_type="camera_2.2", in_dim=36, in_dim_control_adapter=24), (16, 3, 8, 10), 4096
    ),
    "humo": Tiny(_over_wan("HumoWanModel"), (16, 3, 8, 10), 4096, _speech),
    "humo_17b": Tiny(_over_wan("HumoWanModel", in_dim=36), (16, 3, 8, 10), 4096, _speech),
    "animate": Tiny(_over_wan("AnimateWanModel", "model_animate", in_dim=36, num_layers=5), (16, 3, 8, 10), 4096),
    "kandinsky": Tiny(
        of_class("kandinsky5.model.Kandinsky5", model_dim=HEADS * 64, num_visual_blocks=3, **KANDINSKY),
        (16, 3, 8, 10),
        3584,
        pooled=768,
    ),
    "kandinsky_image": Tiny(
        of_class(
            "kandinsky5.model.Kandinsky5",
            "meta",
            model_dim=2560,
            visual_embed_dim=64,
            num_visual_blocks=2,
            axes_dims=(32, 48, 48),
            rope_scale_factor=(1.0, 1.0, 1.0),
            **KANDINSKY,
        ),
        (16, 10, 14),
        3584,
        pooled=768,
    ),
    "lumina": Tiny(_lumina(HEADS * 96, LUMINA), (16, 9, 14), 2304, metadata={"sizes": json.dumps(LUMINA)}),
    "wide_lumina": Tiny(_lumina(2304, WIDE_LUMINA, "meta"), (16, 9, 14), 2304),
    "radiance": Tiny(
        lambda _, operations: _radiance(HEADS, RADIANCE, layer_settings(operations)),
        (3, 80, 112),
        64,
        metadata={"sizes": json.dumps(RADIANCE)},
    ),
    "wide_radiance": Tiny(lambda _, operations: _wide_radiance(operations), (3, 80, 112), 64),
    "omnigen2": Tiny(
        of_class("omnigen.omnigen2.OmniGen2Transformer2DModel", **OMNIGEN2),
        (16, 9, 14),
        48,
        _shown,
        metadata={"sizes": json.dumps(OMNIGEN2)},
    ),
    "boogu": Tiny(
        of_class(
            "boogu.model.BooguTransformer2DModel",
            hidden_size=HEADS * 64,
            num_layers=2,
            num_double_stream_layers=2,
            num_refiner_layers=1,
            instruction_feat_dim=48,
            **BOOGU,
        ),
        (16, 9, 14),
        48,
        _shown,
        metadata={"sizes": json.dumps(BOOGU)},
    ),
    "ernie": Tiny(
        of_class("ernie.model.ErnieImageModel", **ERNIE), (128, 5, 7), 48, metadata={"sizes": json.dumps(ERNIE)}
    ),
    "auraflow": Tiny(
        of_class("aura.mmdit.MMDiT", n_layers=4, n_double_layers=2, max_seq=64, **AURAFLOW),
        (4, 9, 14),
        2048,
        metadata={"sizes": json.dumps(AURAFLOW)},
    ),
    "wide_auraflow": Tiny(
        of_class("aura.mmdit.MMDiT", "meta", n_layers=2, n_double_layers=1, max_seq=64), (4, 9, 14), 2048
    ),
    "ideogram": Tiny(
        of_class("ideogram4.model.Ideogram4Transformer2DModel", num_layers=3, **IDEOGRAM),
        (128, 5, 7),
        48,
        metadata={"sizes": json.dumps(IDEOGRAM)},
    ),
    "wide_ideogram": Tiny(
        of_class("ideogram4.model.Ideogram4Transformer2DModel", "meta", num_layers=1), (128, 5, 7), 53248
    ),
    "mage_flow": Tiny(
        of_class("mage_flow.model.MageFlowTransformer2DModel", num_layers=3, **MAGE_FLOW),
        (128, 5, 7),
        2560,
        metadata={"sizes": json.dumps(MAGE_FLOW)},
    ),
    "wide_mage_flow": Tiny(
        of_class("mage_flow.model.MageFlowTransformer2DModel", "meta", num_layers=1), (128, 5, 7), 2560
    ),
    "anima": Tiny(_anima, (16, 1, 9, 14), 1024, _words),
    "krea2": Tiny(_krea2, (16, 1, 9, 14), 80),
    "sd3": Tiny(_sd3, (16, 9, 14), 4096, pooled=2048),
}
