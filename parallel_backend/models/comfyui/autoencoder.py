"""ComfyUI's autoencoders on the meta device, as ComfyUI's own detection finds them in a file."""

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
"""Names for messages of the autoencoders whose code was tested with parallel rows, by class and module of the decoder."""

DIFFUSERS = "decoder.up_blocks.0.resnets.0.norm1.weight"
"""The tensor by which ComfyUI recognises a file with diffusers' names."""


@dataclass(frozen=True)
class Detected:
    """An autoencoder of ComfyUI on the meta device.

    Attributes:
        vae: ComfyUI's VAE object around the autoencoder, which knows the relation of frames to latents and pixels.
        kind: its name for messages.
        names: the file's names of tensors, by ComfyUI's names; empty if the names are equal.
        missing: the first tensor that encoding needs and the file lacks, or empty. If it is not empty, the model has no parts
            for encoding.
    """

    vae: Any
    kind: str
    names: Mapping[str, str]
    missing: str = ""

    @property
    def module(self) -> nn.Module:
        """Return the autoencoder itself."""
        return self.vae.first_stage_model  # type: ignore[no-any-return]


def detect(checkpoint: Checkpoint) -> Detected:
    """Return the autoencoder that ComfyUI finds in a file.

    Raises:
        Refused: the file has no autoencoder, or an unsupported one.
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
    """Return the file's names of tensors by ComfyUI's names; empty if the file does not have diffusers' names."""
    from comfy.diffusers_convert import convert_vae_state_dict

    if DIFFUSERS not in checkpoint.entries:
        return {}
    return dict(zip(convert_vae_state_dict(checkpoint.meta_tensors()), checkpoint.entries, strict=True))


@contextmanager
def on_meta(checkpoint: Checkpoint) -> Iterator[dict[str, Tensor]]:
    """Yield a file's tensors on the meta device, for ComfyUI to make a VAE. It may read their values in this context.

    Raises:
        Refused: the file lacks tensors, or the tensors do not fit ComfyUI's VAE of this kind.
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
            f"{file} holds a VAE whose class reads values of tensors during its construction ({error}), which is not "
            "supported: use Load VAE."
        ) from None
    except RuntimeError as error:
        raise Refused(
            f"{file} has tensors of other sizes than ComfyUI's VAE of this kind "
            f"({str(error).splitlines()[-1].strip().rstrip('.')}): choose another VAE file."
        ) from None


def noise_scale(model: Any) -> float:
    """Return the fraction of random noise that an autoencoder mixes into a latent before decoding; 0 for most."""
    return float(model.decode_noise_scale) if getattr(model, "timestep_conditioning", False) else 0.0


def with_noise(latent: Tensor, scale: float) -> Tensor:
    """Mix noise into a latent as LTX-Video's decoder does, with torch's default generator. One rank does this for all."""
    return torch.randn_like(latent) * scale + (1.0 - scale) * latent


def compute_buffers(model: Any) -> None:
    """Set the buffers that MiniMax-H3's class computes in its constructor. The meta device loses them; files may lack them."""
    code, rope = sys.modules[type(model).__module__], model.decoder.pos_embed
    model.latents_mean, model.latents_std = torch.tensor(code.LATENTS_MEAN), torch.tensor(code.LATENTS_STD)
    model.pixel_mean, model.pixel_std = (
        torch.tensor(numbers).view(1, 3, 1, 1, 1) for numbers in (code.IMAGENET_MEAN, code.IMAGENET_STD)
    )
    rope.inv_freq = type(rope)(2 * rope.n_dim * len(rope.inv_freq), n_dim=rope.n_dim).inv_freq


def _buffers_to_parameters(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Turn the buffers that a file holds, or must hold, into parameters, so that they are loaded like weights."""
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
