"""The call of a diffusion model that ComfyUI's own class around it makes for noise and a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

LATENT_SHAPES = "latent_shapes"
"""ComfyUI's name for the shapes of several latents that are packed in one."""

MASK = "denoise_mask"
"""ComfyUI's name for the latent's mask, which its classes get together with a prompt."""


@dataclass(frozen=True)
class OwnCall:
    """The arguments of one call of a diffusion model's forward.

    Attributes:
        latent: `[batch, channels, (frames,) height, width]`, or a list of several latents.
        timestep: the timestep in the model's form.
        arguments: the other arguments, by the names of the model's forward.
        options: its transformer_options.
    """

    latent: Any
    timestep: Any
    arguments: Mapping[str, Any]
    options: Mapping[str, Any]


class _Called(Exception):
    """Raised to stop `apply_model` at the call of the diffusion model. It carries the arguments of the call."""


def conditioning_of(base: Any, noise: Sequence[Tensor], prompt: Mapping[str, Any]) -> dict[str, Any]:
    """Return the conditioning objects that a class's `extra_conds` makes of a prompt, by argument name.

    Args:
        base: ComfyUI's BaseModel, in memory.
        noise: `[batch, channels, (frames,) height, width]`, or several latents of such shapes.
        prompt: the entries that nodes add, by ComfyUI's names. `denoise_mask` is the latent's mask, or a list with one mask for
            each latent.
    """
    latent, shapes = _packed(base, noise)
    entry = {"model_conds": {}, "seed": 0, **prompt}
    if (mask := entry.get(MASK)) is not None:  # a sampler expands the mask to the latent's shape
        masks = mask if isinstance(mask, list) else [mask]
        entry[MASK], _ = _packed(base, [each.expand_as(part) for each, part in zip(masks, noise, strict=True)])
    more = {"latent_image": latent, MASK: None, LATENT_SHAPES: shapes}
    encode = import_module("comfy.samplers").encode_model_conds
    (encoded,) = encode(base.extra_conds, [entry], latent, latent.device, "positive", **more)
    conditioning: dict[str, Any] = encoded["model_conds"]
    return conditioning


def own_call(
    base: Any,
    noise: Sequence[Tensor],
    prompt: Mapping[str, Any],
    sigma: float,
    options: Mapping[str, Any] | None = None,
) -> OwnCall:
    """Return the arguments with which ComfyUI's class calls its diffusion model. The model itself does not run.

    Args:
        base, noise, prompt: as in `conditioning_of`.
        sigma: the noise level of the call.
        options: the transformer_options that the call begins with.
    """
    latent, _ = _packed(base, noise)
    rows = latent.shape[0]
    conditioning = {
        name: each.process_cond(batch_size=rows, area=None).cond
        for name, each in conditioning_of(base, noise, prompt).items()
    }

    def called(module: Any, args: Any, kwargs: Any) -> None:
        raise _Called(args, kwargs)

    handle = base.diffusion_model.register_forward_pre_hook(called, with_kwargs=True)
    try:
        base.apply_model(latent, torch.full((rows,), sigma), transformer_options=dict(options or {}), **conditioning)
    except _Called as call:
        (x, timestep), arguments = call.args
    finally:
        handle.remove()
    return OwnCall(x, timestep, arguments, arguments.pop("transformer_options"))


def own_class(kind: str, model: Any, configuration: Mapping[str, Any]) -> Any:
    """Return ComfyUI's BaseModel around an existing diffusion model.

    Args:
        kind: the name of the class in comfy.supported_models.
        configuration: the configuration of the file as ComfyUI detects it. The class's general configuration is added.
    """
    described = getattr(import_module("comfy.supported_models"), kind)
    sizes = {name: getattr(model, name, None) for name in ("in_channels", "out_channels")} | {"hidden_size": 3072}
    entries = {**described.unet_config, **sizes, **configuration, "disable_unet_model_creation": True}
    base = described(entries).get_model({}, "")
    base.diffusion_model = model
    return base


def _packed(base: Any, noise: Sequence[Tensor]) -> tuple[Tensor, list[tuple[int, ...]]]:
    """Return the latents packed in one, as a sampler has them, and their shapes, which a class may read."""
    latent, shapes = import_module("comfy.utils").pack_latents([*noise]) if len(noise) > 1 else (noise[0], None)
    shapes = [tuple(each.shape) for each in noise] if shapes is None else shapes
    if hasattr(base, LATENT_SHAPES):
        base.latent_shapes = shapes
    return latent, shapes
