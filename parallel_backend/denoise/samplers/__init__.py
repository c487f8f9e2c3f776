"""ComfyUI's samplers, and CogVideoX's own, as coroutines, equal to the originals step by step and free of ComfyUI.

`start` makes a running sampler; drive it with

    steps = start("euler", x, sigmas, process=Flow(first_sigma), seed=seed)
    call = next(steps)
    while True:
        denoised = model(call.x, call.sigma)
        call = steps.send(denoised)         # StopIteration.value is the final latent
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from ...errors import Refused
from .ancestral import ddpm, dpm_2_ancestral, dpmpp_2s_ancestral, euler_ancestral, lcm
from .base import ModelCall, Steps
from .cogvideox import cogvideox_ddim, cogvideox_dpm
from .multistep import deis, dpmpp_2m, gradient_estimation, ipndm, res_multistep
from .noise import LatentNoise, Share, whole
from .onestep import dpm_2, euler, heun
from .process import Diffusion, Flow, Process, process_of
from .sde import dpmpp_2m_sde, dpmpp_3m_sde, dpmpp_sde, er_sde, seeds_2

__all__ = [
    "SAMPLERS",
    "Diffusion",
    "Flow",
    "ModelCall",
    "Process",
    "SamplerDef",
    "Steps",
    "check",
    "process_of",
    "start",
]

_NOTHING: Mapping[str, object] = MappingProxyType({})

Kind = type[float] | type[int] | tuple[str, ...]
"""What an option may be set to: a number, a whole number, or one of these words."""


@dataclass(frozen=True)
class SamplerDef:
    """What stands behind a sampler's ComfyUI name."""

    run: Callable[..., Steps]
    """See `base`."""
    options: Mapping[str, Kind] = field(default_factory=dict)
    """What ComfyUI's own sampler nodes can set, under ComfyUI's names; the defaults are those of `run`."""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Arguments of `run` that tell samplers apart which share it."""
    own: bool = False
    """Not ComfyUI's but a model's own, for diffusion of zero terminal SNR; ComfyUI is given it under this name."""


_STRENGTH: Mapping[str, Kind] = MappingProxyType({"eta": float, "s_noise": float})
_2M_SDE: Mapping[str, Kind] = MappingProxyType({**_STRENGTH, "solver_type": ("midpoint", "heun")})
_GPU: Mapping[str, object] = MappingProxyType({"cpu_tree": False})
_EXP_HEUN: Mapping[str, object] = MappingProxyType({"solver_type": "phi_2", "r": 1.0})

SAMPLERS: Mapping[str, SamplerDef] = MappingProxyType(
    {
        "euler": SamplerDef(euler),
        "euler_ancestral": SamplerDef(euler_ancestral, _STRENGTH),
        "heun": SamplerDef(heun),
        "dpm_2": SamplerDef(dpm_2),
        "dpm_2_ancestral": SamplerDef(dpm_2_ancestral),
        "dpmpp_2s_ancestral": SamplerDef(dpmpp_2s_ancestral, _STRENGTH),
        "dpmpp_sde": SamplerDef(dpmpp_sde, {**_STRENGTH, "r": float}),
        "dpmpp_sde_gpu": SamplerDef(dpmpp_sde, {**_STRENGTH, "r": float}, _GPU),
        "dpmpp_2m": SamplerDef(dpmpp_2m),
        "dpmpp_2m_sde": SamplerDef(dpmpp_2m_sde, _2M_SDE),
        "dpmpp_2m_sde_gpu": SamplerDef(dpmpp_2m_sde, _2M_SDE, _GPU),
        "dpmpp_2m_sde_heun": SamplerDef(dpmpp_2m_sde, fixed={"solver_type": "heun"}),
        "dpmpp_2m_sde_heun_gpu": SamplerDef(dpmpp_2m_sde, fixed={"solver_type": "heun", **_GPU}),
        "dpmpp_3m_sde": SamplerDef(dpmpp_3m_sde, _STRENGTH),
        "dpmpp_3m_sde_gpu": SamplerDef(dpmpp_3m_sde, _STRENGTH, _GPU),
        "ddpm": SamplerDef(ddpm),
        "lcm": SamplerDef(lcm, {"s_noise": float, "s_noise_end": float, "noise_clip_std": float}),
        "ipndm": SamplerDef(ipndm),
        "deis": SamplerDef(deis),
        "res_multistep": SamplerDef(res_multistep),
        "res_multistep_ancestral": SamplerDef(res_multistep, fixed={"eta": 1.0}),
        "gradient_estimation": SamplerDef(gradient_estimation),
        "er_sde": SamplerDef(er_sde, {"s_noise": float, "max_stage": int}),
        "seeds_2": SamplerDef(seeds_2, {**_STRENGTH, "r": float, "solver_type": ("phi_1", "phi_2")}),
        "exp_heun_2_x0": SamplerDef(seeds_2, fixed={**_EXP_HEUN, "eta": 0.0}),
        "exp_heun_2_x0_sde": SamplerDef(seeds_2, fixed=_EXP_HEUN),
        "cogvideox_ddim": SamplerDef(cogvideox_ddim, own=True),
        "cogvideox_dpm": SamplerDef(cogvideox_dpm, own=True),
    }
)
"""Every sampler that is supported, by ComfyUI's name for it."""


def check(name: str, options: Mapping[str, object] = _NOTHING) -> None:
    """Raise `Refused`, a ValueError, unless `start` takes this sampler with these options.

    An option that is None is taken as not given, as it is in ComfyUI's own functions.
    """
    if name not in SAMPLERS:
        raise Refused(f"The sampler {name!r} is not supported; these are: {', '.join(sorted(SAMPLERS))}.")
    kinds = SAMPLERS[name].options
    for option, value in options.items():
        if value is None:
            continue
        if option not in kinds:
            takes = ", ".join(sorted(kinds)) or "none"
            raise Refused(
                f"The sampler {name!r} is not supported with the option {option!r}; its options are: {takes}."
            )
        kind = kinds[option]
        if isinstance(kind, tuple):
            if value not in kind:
                raise Refused(f"The option {option!r} of {name!r} must be {' or '.join(kind)}, not {value!r}.")
        elif isinstance(value, bool) or not isinstance(value, (int, kind)):
            raise Refused(f"The option {option!r} of {name!r} must be of type {kind.__name__}, not {value!r}.")


def start(
    name: str,
    x: Tensor,
    sigmas: Tensor,
    *,
    process: Process,
    seed: int,
    options: Mapping[str, object] = _NOTHING,
    latent_shape: tuple[int, ...] | None = None,
    share: Share = whole,
) -> Steps:
    """A sampler, ready to run from the noisy latent `x` (fp32) down the schedule `sigmas` (1-D, any device).

    `seed` is that of the fresh noise. If `x` is one patch, `latent_shape` is the shape of the whole latent,
    batch included, and `share` gives the patch its part of noise of that shape. Raises what `check` raises, at once;
    the sampler itself runs only when driven, and is to be driven without autograd.
    """
    check(name, options)
    if SAMPLERS[name].own and not isinstance(process, Diffusion):
        raise Refused(f"The sampler {name!r} is made for CogVideoX: choose another one for this model, such as euler.")
    assert x.dtype == torch.float32 and sigmas.ndim == 1
    given = {option: value for option, value in options.items() if value is not None}
    sampler = SAMPLERS[name]
    noise = LatentNoise(latent_shape or tuple(x.shape), x.device, seed, share)
    return sampler.run(x, sigmas.to("cpu", torch.float32), process, noise, **sampler.fixed, **given)
