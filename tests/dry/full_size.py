"""Models at full size, as files that have only a header, and the inputs of a denoise of each model."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from parallel_backend.conditioning import ASKED, SHAPES, TEXT_PREPARATION, flatten
from parallel_backend.diffusion import DiffusionSettings, FlowSettings, Sampling
from tests.support.sparse_files import write_sparse

FLOW = FlowSettings(1.0, 1.0)

SETTINGS: Mapping[str, Any] = {"dtype": torch.bfloat16, "device": "meta"}


@dataclass(frozen=True)
class Job:
    """A model and one denoise.

    `make` gets ComfyUI's layers. `latent` is the latent's shape and `prompt` the shapes of the conditioning, both without the
    batch; `values` is the conditioning that is not tensors. `blocks` is the number of units that stages are cut from, `short`
    the number with two of each kind. `family` computes the model.
    """

    make: Callable[[Any], Any]
    latent: tuple[int, ...]
    prompt: Mapping[str, tuple[int, ...]]
    blocks: int
    short: int
    values: Mapping[str, Any] = field(default_factory=dict)
    family: str = "comfyui"
    sampler: str = "euler"
    sampling: Sampling = FLOW


def flux(
    operations: Any, *, doubles: int = 19, singles: int = 38, heads: int = 24, text: int = 4096, pooled: int = 768
) -> Any:
    from comfy.ldm.flux.model import Flux

    return Flux(
        in_channels=16, out_channels=16, vec_in_dim=pooled, context_in_dim=text, hidden_size=128 * heads, mlp_ratio=4.0,
        num_heads=heads, depth=doubles, depth_single_blocks=singles, axes_dim=[16, 56, 56], theta=10000, patch_size=2,
        qkv_bias=True, guidance_embed=True, txt_ids_dims=[], operations=operations, **SETTINGS,
    )  # fmt: skip


def flux2(operations: Any, *, hidden: int = 6144, doubles: int = 8, singles: int = 48, text: int = 15360) -> Any:
    from comfy.ldm.flux.model import Flux

    return Flux(
        in_channels=128, out_channels=128, vec_in_dim=None, context_in_dim=text, hidden_size=hidden, mlp_ratio=3.0,
        num_heads=hidden // 128, depth=doubles, depth_single_blocks=singles, axes_dim=[32] * 4, theta=2000, patch_size=1,
        qkv_bias=False, guidance_embed=True, txt_ids_dims=[3], global_modulation=True, mlp_silu_act=True, ops_bias=False,
        operations=operations, **SETTINGS,
    )  # fmt: skip


def wan(operations: Any, *, hidden: int = 5120, inner: int = 13824, layers: int = 40, channels: int = 16) -> Any:
    from comfy.ldm.wan.model import WanModel

    return WanModel(
        model_type="t2v", in_dim=channels, out_dim=channels, dim=hidden, ffn_dim=inner, text_dim=4096,
        num_heads=hidden // 128, num_layers=layers, operations=operations, **SETTINGS,
    )  # fmt: skip


def qwen(operations: Any) -> Any:
    from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(num_layers=60, operations=operations, **SETTINGS)


def z_image(operations: Any) -> Any:
    from comfy.ldm.lumina.model import NextDiT

    return NextDiT(
        patch_size=2, in_channels=16, dim=3840, n_layers=30, n_heads=30, n_kv_heads=30, cap_feat_dim=2560, qk_norm=True,
        axes_dims=[32, 48, 48], axes_lens=[1536, 512, 512], rope_theta=256.0, ffn_dim_multiplier=8.0 / 3.0,
        z_image_modulation=True, time_scale=1000.0, pad_tokens_multiple=32, operations=operations, **SETTINGS,
    )  # fmt: skip


def hunyuan15(operations: Any) -> Any:
    from comfy.ldm.hunyuan_video.model import HunyuanVideo

    return HunyuanVideo(
        in_channels=65, out_channels=32, vec_in_dim=None, context_in_dim=3584, hidden_size=2048, mlp_ratio=4.0, num_heads=16,
        depth=54, depth_single_blocks=0, axes_dim=[16, 56, 56], theta=256, patch_size=[1, 1, 1], qkv_bias=True,
        guidance_embed=False, byt5=True, meanflow=False, use_cond_type_embedding=False, vision_in_dim=1152,
        meanflow_sum=False, operations=operations, **SETTINGS,
    )  # fmt: skip


def minimax(operations: Any) -> Any:
    from comfy.ldm.minimax.model import MiniMaxH3Model

    return MiniMaxH3Model(operations=operations, **SETTINGS)


def ltxav(operations: Any) -> Any:
    from comfy.ldm.lightricks.av_model import LTXAVModel

    return LTXAVModel(operations=operations, **SETTINGS)


def _cogvideox(_: Any) -> Any:
    from diffusers import CogVideoXTransformer3DModel

    with torch.device("meta"):
        return CogVideoXTransformer3DModel(
            num_attention_heads=48, attention_head_dim=64, num_layers=42, text_embed_dim=4096, patch_size_t=2,
            patch_bias=False, use_rotary_positional_embeddings=True,
        )  # fmt: skip


def _packed(*shapes: tuple[int, ...]) -> tuple[tuple[int, ...], Mapping[str, Any]]:
    """Return the shape of a latent that packs these latents, without the batch, and the values that describe them."""
    values: dict[str, Any] = {}
    flatten(SHAPES, [[1, *shape] for shape in shapes], {}, values)
    return (1, sum(map(math.prod, shapes))), values


LTX_LATENT, LTX_VALUES = _packed((128, 16, 22, 40), (8, 126, 16))
VIDEO_AND_SOUND, MINIMAX_VALUES = _packed((24, 107, 48, 84), (32, 2, 600))


def flux_job(doubles: int, singles: int, *, small: bool = False) -> Job:
    """Return a job of a FLUX.1 with some blocks at full width, or of a narrow one and a small picture."""
    widths = {"heads": 4, "text": 64, "pooled": 32} if small else {"heads": 24, "text": 4096, "pooled": 768}
    prompt = {"context": (21 if small else 512, widths["text"]), "y": (widths["pooled"],), "guidance": ()}
    make = functools.partial(flux, doubles=doubles, singles=singles, **widths)
    return Job(make, (16, 18, 22) if small else (16, 128, 128), prompt, doubles + singles, 4)


JOBS: Mapping[str, Job] = {
    "FLUX.1-dev": flux_job(19, 38),
    "FLUX.2-dev": Job(flux2, (128, 64, 64), {"context": (512, 15360), "guidance": ()}, 56, 4),
    "Wan 2.2 14B": Job(wan, (16, 21, 90, 160), {"context": (512, 4096)}, 40, 2),
    "Qwen-Image": Job(qwen, (16, 1, 128, 128), {"context": (256, 3584)}, 60, 2),
    "Z-Image": Job(z_image, (16, 128, 128), {"context": (128, 2560)}, 32, 4, {"num_tokens": 128}),
    "HunyuanVideo 1.5": Job(hunyuan15, (32, 31, 45, 80), {"context": (256, 3584), "concat": (33, 31, 45, 80)}, 54, 2),
    "MiniMax-H3": Job(
        minimax,
        VIDEO_AND_SOUND,
        {"context": (512, 5120)},
        50,
        2,
        {**MINIMAX_VALUES, "minimax_payload.seed": 0, f"{TEXT_PREPARATION}.{ASKED}": True},
    ),
    "LTX-2": Job(ltxav, LTX_LATENT, {"context": (1024, 7680)}, 48, 2, {**LTX_VALUES, "frame_rate": 25}),
    "CogVideoX 1.5": Job(
        _cogvideox,
        (16, 22, 96, 170),
        {"context": (226, 4096)},
        42,
        2,
        family="cogvideox",
        sampler="cogvideox_ddim",
        sampling=DiffusionSettings("v"),
    ),
    "FLUX.1-dev, four blocks": flux_job(2, 2),
    "FLUX.1, small": flux_job(2, 2, small=True),
    "FLUX.1-dev, sixteen blocks": flux_job(4, 12),
    "FLUX.1, small, sixteen blocks": flux_job(4, 12, small=True),
}
"""Jobs for pictures of 1024 x 1024 pixels and videos of 1280 x 720: 81 frames are 75,600 tokens of Wan, 121 are 111,600 of
Hunyuan.

MiniMax-H3's video has 1344 x 768 pixels: 107,856 tokens besides those of its sound. LTX-2's has 1280 x 704 and 121 frames.
CogVideoX 1.5's has 1360 x 768 and 85 frames: 44,880 tokens. The last four jobs are for real computation (scripts/gpu_check),
the small ones on a CPU.
"""


@dataclass(frozen=True)
class Clip:
    """An autoencoder of ComfyUI and the shape of a latent that it decodes; `short` is the shape of a latent of few frames."""

    make: Callable[[], Any]
    latent: tuple[int, ...]
    short: tuple[int, ...]


_OF_PICTURES = {
    "double_z": True, "z_channels": 16, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128, "ch_mult": [1, 2, 4, 4],
    "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0,
}  # fmt: skip
"""ComfyUI's settings of the autoencoders of pictures."""


def _flux_vae() -> Any:
    from comfy.ldm.models.autoencoder import AutoencodingEngine

    module = "comfy.ldm.modules.diffusionmodules.model"
    return AutoencodingEngine(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
        encoder_config={"target": f"{module}.Encoder", "params": _OF_PICTURES},
        decoder_config={"target": f"{module}.Decoder", "params": _OF_PICTURES},
    )


def _flux2_vae() -> Any:
    from comfy.ldm.models.autoencoder import AutoencoderKL

    return AutoencoderKL(ddconfig={**_OF_PICTURES, "z_channels": 32, "batch_norm_latent": True}, embed_dim=32)


def _wan_vae() -> Any:
    from comfy.ldm.wan.vae import WanVAE

    return WanVAE(dim=96, z_dim=16, temperal_downsample=[False, True, True])


CLIPS: Mapping[str, Clip] = {
    "FLUX.1's VAE": Clip(_flux_vae, (1, 16, 128, 128), (1, 16, 128, 128)),
    "FLUX.2's VAE": Clip(_flux2_vae, (1, 128, 64, 64), (1, 128, 64, 64)),
    "Wan 2.1's VAE": Clip(_wan_vae, (1, 16, 21, 90, 160), (1, 16, 3, 90, 160)),
}
"""Decodes of a picture of 1024 x 1024 pixels, and of 81 frames of 1280 x 720."""


def write_header(folder: Path, name: str) -> Path:
    """Write a safetensors file of a model or autoencoder at full size without data, as a sparse file."""
    import comfy.ops

    if name in JOBS:
        module = JOBS[name].make(comfy.ops.disable_weight_init)
    else:
        with torch.device("meta"):
            module = CLIPS[name].make()
    return write_sparse(folder / f"{name}.safetensors", module.state_dict())
