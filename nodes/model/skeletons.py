"""ComfyUI's model classes on the meta device, changed where their sampling or conditioning differs from the original code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import comfy.conds
import comfy.latent_formats
import comfy.model_base
import comfy.model_detection
import comfy.model_sampling
import comfy.supported_models
import torch
from torch import Tensor

from ...parallel_backend.models.diffusers.cogvideox import CogVideoXConfig
from ...parallel_backend.models.diffusers.pixart import HEADS, PixArtConfig
from .features.text import prepared_by_workers

META = torch.device("meta")


class CogVideoXSampling(comfy.model_sampling.ModelSamplingDiscrete, comfy.model_sampling.V_PREDICTION):
    """CogVideoX's noise schedule: v-prediction, zero terminal SNR and a shift of the SNR.

    ComfyUI's class for CogVideoX has no shift and gives the model an unscaled latent.
    """

    def __init__(self, snr_shift: float) -> None:
        super().__init__()
        betas = torch.linspace(0.00085**0.5, 0.012**0.5, self.num_timesteps, dtype=torch.float64) ** 2
        alphas = (1 - betas).cumprod(dim=0)
        sigmas = (snr_shift * (1 - alphas) / alphas).sqrt()
        self.zsnr = True
        self.set_sigmas(comfy.model_sampling.rescale_zero_terminal_snr_sigmas(sigmas))


class CogVideoX(comfy.model_base.CogVideoX):
    """ComfyUI's CogVideoX with the original's noise schedule, text that is never repeated, and image latents as in training."""

    def __init__(self, model_config: Any, config: CogVideoXConfig) -> None:
        super().__init__(model_config, device=META)
        self.model_sampling = CogVideoXSampling(config.snr_shift)
        self._image_scale = self.latent_format.scale_factor**-2 if config.offset else 1.0

    def concat_cond(self, **kwargs: Any) -> Tensor | None:
        """Return the image's latent; None if there is none. ComfyUI's class would use zeros.

        CogVideoX 1.5 was trained on image latents divided by the scale, not multiplied by it (invert_scale_latents).
        """
        image = kwargs.get("concat_latent_image")
        if image is None or self.diffusion_model.in_channels == kwargs["noise"].shape[1]:
            return image
        copied = kwargs | {"concat_latent_image": image.clone()}  # ComfyUI's method writes into the image
        return super().concat_cond(**copied) * self._image_scale

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """Return ComfyUI's conditions without repeated text.

        Repeating it to another prompt's length would change joint attention.
        """
        conds = super().extra_conds(**kwargs)
        if "c_crossattn" in conds:
            conds["c_crossattn"] = comfy.conds.CONDRegular(conds["c_crossattn"].cond)
        return conds


class PixArt(comfy.model_base.PixArt):
    """ComfyUI's PixArt that also takes the mask of the text. This class fills in sizes that ComfyUI fills in at every call."""

    def __init__(self, model_config: Any, config: PixArtConfig) -> None:
        super().__init__(model_config, device=META)
        self._micro_conditions = config.micro_conditions

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """Return ComfyUI's conditions with `attention_mask`, and with the picture's size if the model takes it."""
        conds = super().extra_conds(**kwargs)
        conditioning = {"attention_mask": kwargs.get("attention_mask")}
        if self._micro_conditions and "c_size" not in conds:
            height, width = kwargs["noise"].shape[-2:]
            conditioning |= {
                "c_size": torch.tensor([[8.0 * height, 8.0 * width]]),
                "c_ar": torch.tensor([[height / width]]),
            }
        if not self._micro_conditions:
            conds = {name: cond for name, cond in conds.items() if name not in ("c_size", "c_ar")}
        return conds | {
            name: comfy.conds.CONDRegular(tensor) for name, tensor in conditioning.items() if tensor is not None
        }


@dataclass(frozen=True)
class Skeleton:
    """The functions that build ComfyUI's model of a family.

    `describe` returns the model_config for the file's meta tensors and the family's configuration; None if ComfyUI does not
    know the model. `make` builds the model from these three.
    """

    describe: Callable[[Mapping[str, Tensor], Any], Any]
    make: Callable[[Any, Mapping[str, Tensor], Any], Any]


def _detect(tensors: Mapping[str, Tensor], _config: Any) -> Any:
    return comfy.model_detection.model_config_from_unet(tensors, "")


def _describe_cogvideox(tensors: Mapping[str, Tensor], config: CogVideoXConfig) -> Any:
    model_config = _detect(tensors, config)
    formats = comfy.latent_formats
    model_config.latent_format = formats.CogVideoX1_5() if config.rotary else formats.CogVideoX()
    model_config.unet_config |= {
        "num_attention_heads": config.heads,
        "attention_head_dim": config.head_dim,
        "use_learned_positional_embeddings": False,  # ComfyUI would create them in this process's memory
        "use_rotary_positional_embeddings": True,
    }
    return model_config


def _describe_pixart(_tensors: Mapping[str, Tensor], config: PixArtConfig) -> Any:
    """Return the model_config without detection, as files may have diffusers' names. A model without size inputs is Sigma."""
    alpha, sigma = comfy.supported_models.PixArtAlpha, comfy.supported_models.PixArtSigma
    kind = alpha if config.micro_conditions else sigma
    return kind(
        kind.unet_config
        | {
            "hidden_size": config.hidden,
            "num_heads": HEADS,
            "in_channels": config.channels,
            "depth": config.layers,
            "micro_condition": config.micro_conditions,
        }
    )


SKELETONS: Mapping[str, Skeleton] = MappingProxyType(
    {
        "cogvideox": Skeleton(_describe_cogvideox, lambda described, _, config: CogVideoX(described, config)),
        "comfyui": Skeleton(
            lambda _, config: config.described,
            lambda described, tensors, config: prepared_by_workers(config.base(described.unet_config["dtype"])),
        ),
        "pixart": Skeleton(_describe_pixart, lambda described, _, config: PixArt(described, config)),
    }
)
"""The functions that build each family's MODEL without weights, by the family's name."""
