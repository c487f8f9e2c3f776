"""ComfyUI's own autoencoders, small and random, as its `comfy.sd.VAE` builds them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.support.comfy_oracle import comfy_on_path
from tests.support.tiny.vae import random_weights

IMAGE = {"double_z": True, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 32, "ch_mult": [1, 2, 4, 4]} | {
    "num_res_blocks": 1,
    "attn_resolutions": [],
    "dropout": 0.0,
}
DEEP = {"in_channels": 3, "out_channels": 3, "num_res_blocks": 1} | {
    "downsample_match_channel": True,
    "upsample_match_channel": True,
}
WAN = {"dim": 8, "temperal_downsample": [False, True, True]}
LTX = {"dims": 3, "latent_channels": 128, "encoder_base_channels": 8, "decoder_base_channels": 8} | {
    "norm_layer": "pixel_norm",
    "patch_size": 4,
    "latent_log_var": "uniform",
}
TWICE = {"residual": True, "multiplier": 2}


@dataclass(frozen=True)
class Kind:
    """Settings of an autoencoder and the shape of its latent.

    `scale` and `frames` are the pixels and the frames for each value of the latent.
    """

    scale: int
    latent: tuple[int, ...]
    settings: Mapping[str, Any]
    frames: int = 4

    def sized(self, frames: int, height: int, width: int) -> Kind:
        """Return the same kind with a latent of this size, and of these frames if it is a video's."""
        batch, channels, *of_video, _, _ = self.latent
        return replace(self, latent=(batch, channels, *[frames for _ in of_video], height, width))

    def pixels(self) -> tuple[int, ...]:
        """Return the shape of the pixels that the latent decodes to."""
        batch, _, *frames, height, width = self.latent
        count = [self.frames * (frames[0] - 1) + 1] if frames else []
        return (batch, 3, *count, height * self.scale, width * self.scale)


KINDS = {
    "flux": Kind(8, (1, 16, 5, 3), {**IMAGE, "z_channels": 16}),
    "sd": Kind(8, (1, 4, 2, 7), {**IMAGE, "z_channels": 4}),
    "wan": Kind(8, (1, 16, 3, 5, 3), {**WAN, "z_dim": 16}),
    "wan22": Kind(16, (1, 48, 3, 3, 2), {**WAN, "z_dim": 48, "dec_dim": 8, "dim_mult": [1, 2, 4, 4]}),
    "hunyuan": Kind(8, (1, 16, 3, 4, 3), {**IMAGE, "z_channels": 16, "conv3d": True, "time_compress": 4}),
    "flux2": Kind(16, (1, 128, 5, 4), {**IMAGE, "z_channels": 32, "batch_norm_latent": True}),
    "hunyuan15": Kind(
        16,
        (1, 32, 3, 3, 2),
        {
            **DEEP,
            "block_out_channels": [32, 32, 64, 64, 64],
            "z_channels": 32,
            "ffactor_spatial": 16,
            "ffactor_temporal": 4,
        },
    ),
    "hunyuan_image": Kind(
        32,
        (1, 64, 4, 3),
        {**DEEP, "block_out_channels": [64, 64, 64, 128, 128, 128], "z_channels": 64, "ffactor_spatial": 32},
    ),
    "ltx": Kind(
        32,
        (1, 128, 3, 5, 2),
        {
            **LTX,
            "blocks": [["res_x", 1], *[["compress_all", 1], ["res_x_y", 1]] * 2, ["compress_all", 1], ["res_x", 1]],
        },
        frames=8,
    ),
    "ltx095": Kind(
        32,
        (1, 128, 3, 3, 2),
        {
            **LTX,
            "encoder_blocks": [
                ["res_x", 1],
                ["compress_space_res", {"multiplier": 2}],
                ["compress_time_res", {"multiplier": 2}],
                *[["compress_all_res", {"multiplier": 2}]] * 2,
            ],
            "decoder_blocks": [["res_x", 1], *[["compress_all", TWICE]] * 3, ["res_x", 1]],
            "timestep_conditioning": True,
        },
        frames=8,
    ),
    "ltx2": Kind(
        32,
        (1, 128, 2, 3, 2),
        {
            **LTX,
            "encoder_blocks": [["res_x", 1], *[["compress_all", {}]] * 3],
            "decoder_blocks": [
                *[["compress_all", {"multiplier": 2}]] * 2,
                ["compress_time", {"multiplier": 2}],
                ["compress_space", {"multiplier": 2}],
                ["res_x", 1],
            ],
            "causal_decoder": True,
            "spatial_padding_mode": "zeros",
        },
        frames=8,
    ),
}
"""Kinds of autoencoders, by their names in tests."""


OF_A_FILE = {"ch": 128, "num_res_blocks": 2}
"""Settings that ComfyUI assumes for the encoder of every image VAE's file."""

NOISE_INSIDE: dict[str, Any] = {
    "decoder_blocks": [
        *[["compress_all", {"residual": True, "multiplier": 2}]] * 3,
        ["res_x", {"num_layers": 1, "inject_noise": True}],
    ]
}
"""Settings of `ltx095` that make it a VAE of version 0.9.1, whose decoder adds noise in its layers."""


def save_comfy_vae(path: Path, name: str, **settings: Any) -> None:
    """Write one of `KINDS` to a file, with other settings of its code if given.

    LTX-Video's files contain their settings. Sizes of other files are for a ComfyUI that reads them (families/conftest).
    """
    tensors = {key: tensor.clone() for key, tensor in build(name, **settings).state_dict().items()}
    sizes = {**KINDS[name].settings, **settings}
    metadata = {"config": json.dumps({"vae": sizes})} if name.startswith("ltx") else {"sizes": json.dumps(sizes)}
    save_file(tensors, path, metadata)


def save_image_vae(path: Path, dtype: torch.dtype = torch.float32, name: str = "flux") -> Path:
    """Write a file of FLUX.1's or Stable Diffusion's kind, with a narrow decoder."""
    tensors = build(name, **OF_A_FILE, decoder_ch=32).state_dict()
    save_file({key: tensor.to(dtype).contiguous() for key, tensor in tensors.items()}, path)
    return path


def build(kind: str, **settings: Any) -> nn.Module:
    """Return one of `KINDS` with random weights and statistics."""
    comfy_on_path()
    module = _made(kind, {**KINDS[kind].settings, **settings}).eval()
    module.load_state_dict(random_weights(module, seed=0), strict=False)
    generator = torch.Generator().manual_seed(1)
    saved = module.state_dict()
    for name, buffer in module.named_buffers():
        if name in saved and buffer.is_floating_point():
            buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
    return module


def drawn(kind: Kind) -> tuple[Tensor, Tensor]:
    """Return a latent and pixels from -1 to 1 of a kind's shapes."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(kind.latent, generator=generator), torch.rand(kind.pixels(), generator=generator) * 2 - 1


def _made(name: str, settings: dict[str, Any]) -> nn.Module:
    import comfy.ldm.lightricks.vae.causal_video_autoencoder
    import comfy.ldm.models.autoencoder as engines
    import comfy.ldm.wan.vae
    import comfy.ldm.wan.vae2_2

    if name == "wan":
        return comfy.ldm.wan.vae.WanVAE(**settings)  # type: ignore[no-any-return]
    if name == "wan22":
        return comfy.ldm.wan.vae2_2.WanVAE(**settings)  # type: ignore[no-any-return]
    if name.startswith("ltx"):
        return comfy.ldm.lightricks.vae.causal_video_autoencoder.VideoVAE(config=settings)  # type: ignore[no-any-return]
    decoder = {**settings, "ch": settings.pop("decoder_ch", settings["ch"])} if "ch" in settings else settings
    if name in ("sd", "hunyuan", "flux2"):
        return engines.AutoencoderKL(  # type: ignore[no-any-return]
            ddconfig=settings, decoder_ddconfig=decoder, embed_dim=settings["z_channels"]
        )
    where, regularizer = {
        "flux": ("modules.diffusionmodules.model", "DiagonalGaussianRegularizer"),
        "hunyuan15": ("hunyuan_video.vae_refiner", "EmptyRegularizer"),
        "hunyuan_image": ("hunyuan_video.vae", "DiagonalGaussianRegularizer"),
    }[name]
    return engines.AutoencodingEngine(  # type: ignore[no-any-return]
        regularizer_config={"target": f"comfy.ldm.models.autoencoder.{regularizer}"},
        encoder_config={"target": f"comfy.ldm.{where}.Encoder", "params": settings},
        decoder_config={"target": f"comfy.ldm.{where}.Decoder", "params": decoder},
    )
