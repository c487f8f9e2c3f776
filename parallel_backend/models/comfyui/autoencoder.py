"""ComfyUI's autoencoders: which of them a file holds, by ComfyUI's own detection, on the meta device."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import Refused
from ...weights.files.checkpoint import Checkpoint
from .file_values import ValueUnknown, file_values, named_values
from .importing import import_comfyui

DECLARED: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("WanVAE", "comfy.ldm.wan.vae"): "a Wan 2.1 or Qwen-Image VAE",
        ("WanVAE", "comfy.ldm.wan.vae2_2"): "a Wan 2.2 VAE",
        ("AutoencodingEngine", "comfy.ldm.modules.diffusionmodules.model"): "an image VAE (FLUX.1, Stable Diffusion 3)",
        ("AutoencoderKL", "comfy.ldm.modules.diffusionmodules.model"): "a Stable Diffusion, FLUX.2 or HunyuanVideo VAE",
        ("AutoencodingEngine", "comfy.ldm.hunyuan_video.vae_refiner"): "a HunyuanVideo 1.5 VAE",
        ("AutoencodingEngine", "comfy.ldm.hunyuan_video.vae"): "a HunyuanImage 2.1 VAE",
        ("VideoVAE", "comfy.ldm.lightricks.vae.causal_video_autoencoder"): "an LTX-Video VAE",
        ("MiniMaxH3VideoVAE", "comfy.ldm.minimax.vae"): "a MiniMax-H3 video VAE",
    }
)
"""ComfyUI's class and where its decoder is defined -> its name in sentences: those whose code was tried over rows."""

DIFFUSERS = "decoder.up_blocks.0.resnets.0.norm1.weight"
"""By which ComfyUI knows a file with diffusers' names."""


@dataclass(frozen=True)
class Detected:
    """An autoencoder of ComfyUI's on the meta device.

    `vae` is ComfyUI's own object around it, which knows how frames and pixels go together; `kind` its name in sentences;
    `names` the file's names of tensors where ComfyUI has others, by ComfyUI's. `missing` is the first tensor that encoding needs
    and the file lacks, empty if there is none; the parts that encode are then not there.
    """

    vae: Any
    kind: str
    names: Mapping[str, str]
    missing: str = ""

    @property
    def module(self) -> nn.Module:
        """The autoencoder itself."""
        return self.vae.first_stage_model  # type: ignore[no-any-return]


def detect(checkpoint: Checkpoint) -> Detected:
    """What ComfyUI finds in a file.

    Raises:
        Refused: nothing, or an autoencoder that is not declared.
    """
    import_comfyui()
    import comfy.sd

    file = checkpoint.path.name
    with on_meta(checkpoint) as tensors:
        vae = comfy.sd.VAE(sd=tensors, metadata=dict(checkpoint.metadata))
    model = vae.first_stage_model
    if model is None:
        raise Refused(f"{file} has no tensors of a VAE that ComfyUI knows: choose a VAE file.")
    decoder = getattr(model, "decoder", None)
    kind = DECLARED.get((type(model).__name__, type(decoder).__module__))
    if kind is None or vae.output_channels != 3 or vae.not_video:
        raise Refused(
            f"{file} holds a VAE of ComfyUI's class {type(model).__name__}, which is not supported on several GPUs: use "
            "Load VAE."
        )
    if any(getattr(module, "inject_noise", False) for module in model.modules()):
        raise Refused(
            f"{file} holds {kind} of version 0.9.1, whose decoder adds random noise in its layers, which is not supported "
            "on several GPUs: use Load VAE."
        )
    if hasattr(model, "pixel_mean"):
        compute_buffers(model)
    _buffers_to_parameters(model, checkpoint)
    return Detected(vae, kind, _names(checkpoint))


def _names(checkpoint: Checkpoint) -> Mapping[str, str]:
    """ComfyUI's names of tensors -> the file's, where it has diffusers'."""
    from comfy.diffusers_convert import convert_vae_state_dict

    if DIFFUSERS not in checkpoint.entries:
        return {}
    return dict(zip(convert_vae_state_dict(checkpoint.meta_tensors()), checkpoint.entries, strict=True))


@contextmanager
def on_meta(checkpoint: Checkpoint) -> Iterator[dict[str, Tensor]]:
    """Yield a file's tensors on the meta device, where ComfyUI makes a VAE of them; it may look into them while inside.

    Raises:
        Refused: the file lacks tensors, or has others than ComfyUI's VAE of its kind.
    """
    file = checkpoint.path.name
    tensors = checkpoint.meta_tensors()
    try:
        with file_values(named_values(tensors, checkpoint.entries)), torch.device("meta"):
            yield tensors
    except KeyError as missing:
        raise Refused(f"{file} lacks the tensor {missing}: choose a complete VAE file.") from None
    except ValueUnknown as error:
        raise Refused(
            f"{file} holds a VAE whose class looks into values while it is made ({error}), which is not supported: use Load VAE."
        ) from None
    except RuntimeError as error:
        raise Refused(
            f"{file} has tensors of other sizes than ComfyUI's VAE of this kind "
            f"({str(error).splitlines()[-1].strip().rstrip('.')}): choose another VAE file."
        ) from None


def noise_scale(model: Any) -> float:
    """The share of random noise that an autoencoder mixes into a latent before it decodes it; none by default."""
    return float(model.decode_noise_scale) if getattr(model, "timestep_conditioning", False) else 0.0


def with_noise(latent: Tensor, scale: float) -> Tensor:
    """A latent as LTX-Video's decoder mixes it, with torch's own generator, on one rank for all."""
    return torch.randn_like(latent) * scale + (1.0 - scale) * latent


def compute_buffers(model: Any) -> None:
    """What files need not hold and MiniMax-H3's class computes when it is made, which the meta device loses."""
    code, rope = sys.modules[type(model).__module__], model.decoder.pos_embed
    model.latents_mean, model.latents_std = torch.tensor(code.LATENTS_MEAN), torch.tensor(code.LATENTS_STD)
    model.pixel_mean, model.pixel_std = (
        torch.tensor(numbers).view(1, 3, 1, 1, 1) for numbers in (code.IMAGENET_MEAN, code.IMAGENET_STD)
    )
    rope.inv_freq = type(rope)(2 * rope.n_dim * len(rope.inv_freq), n_dim=rope.n_dim).inv_freq


def _buffers_to_parameters(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Statistics that a file holds, or must hold, are loaded as weights are."""
    for prefix, module in model.named_modules():
        for name in [name for name in module._buffers if name not in module._non_persistent_buffers_set]:
            values = module._buffers[name]
            filed = f"{prefix}.{name}".lstrip(".") in checkpoint.entries or _is_meta(values)
            if values is not None and values.is_floating_point() and filed:
                del module._buffers[name]
                module.register_parameter(name, nn.Parameter(values.to("meta"), requires_grad=False))
                module.get_buffer = module.get_parameter  # type: ignore[method-assign, assignment]
        computed = [name for name in module._non_persistent_buffers_set if _is_meta(module._buffers[name])]
        assert not computed, f"{type(module).__name__} computes {computed}"


def _is_meta(values: Tensor | None) -> bool:
    return values is not None and values.is_meta
