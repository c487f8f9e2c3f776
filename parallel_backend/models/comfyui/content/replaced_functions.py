"""The functions and classes of ComfyUI's sampling that this pack replaces or reaches into, by kind.

The kind decides how a run goes on without the replacement. Samplers are not in the list, because each sampler is recorded
unchanged. Models are not in the list either, because their own forward runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["sampler driver", "guidance", "mask", "noise sampler", "step cache", "adapter", "closure"]

SAMPLING: tuple[Kind, ...] = "sampler driver", "guidance"
"""The kinds that take part in every run."""


@dataclass(frozen=True)
class ReplacedFunction:
    """A function or class that is replaced.

    Attributes:
        module: the name of its module.
        name: its qualified name in the module.
        kind: the part of sampling that it belongs to.
    """

    module: str
    name: str
    kind: Kind

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


def _of(kind: Kind, module: str, *names: str) -> tuple[ReplacedFunction, ...]:
    return tuple(ReplacedFunction(module, name, kind) for name in names)


SAMPLINGS = "calculate_input", "calculate_denoised", "noise_scaling", "inverse_noise_scaling"

REPLACED_FUNCTIONS: tuple[ReplacedFunction, ...] = (
    # the wrapper that replaces `KSAMPLER.sample`, and its inputs (nodes/model/run)
    *_of("sampler driver", "comfy.samplers", "KSAMPLER.sample", "Sampler.max_denoise", "CFGGuider.inner_sample"),
    # a step's evaluation of the prompts (parallel_backend/denoise, nodes/model/run/branches.py)
    *_of(
        "guidance", "comfy.samplers", "CFGGuider.__call__", "CFGGuider.outer_predict_noise", "CFGGuider.predict_noise"
    ),
    *_of("guidance", "comfy.samplers", "sampling_function", "calc_cond_batch", "_calc_cond_batch_outer"),
    *_of("guidance", "comfy.samplers", "_calc_cond_batch", "cfg_function"),
    *_of("guidance", "comfy.model_patcher", "set_model_options_post_cfg_function"),
    *_of("guidance", "comfy.conds", "CONDRegular", "CONDCrossAttn", "CONDConstant", "CONDList", "CONDNoiseShape"),
    *_of("guidance", "comfy.model_base", *(f"BaseModel.{name}" for name in ("apply_model", "_apply_model"))),
    *_of("guidance", "comfy.model_base", "BaseModel.process_timestep"),
    # the noise process (parallel_backend/denoise/process.py, nodes/model/noise_process.py)
    *_of("guidance", "comfy.model_sampling", *(f"{kind}.{name}" for kind in ("CONST", "EPS") for name in SAMPLINGS)),
    *_of("guidance", "comfy.model_sampling", "V_PREDICTION.calculate_denoised"),
    *(
        function
        for kind in ("ModelSamplingDiscrete", "ModelSamplingDiscreteFlow", "ModelSamplingFlux")
        for function in _of("guidance", "comfy.model_sampling", f"{kind}.timestep", f"{kind}.percent_to_sigma")
    ),
    # the code around the model if there is a mask (parallel_backend/denoise/patch_sampler.py)
    *_of("mask", "comfy.samplers", "KSamplerX0Inpaint"),
    *_of("mask", "comfy.model_base", "BaseModel.scale_latent_inpaint"),
    # samplers' sources of noise (nodes/model/recording/noise.py, parallel_backend/denoise/noise.py)
    *_of("noise sampler", "comfy.k_diffusion.sampling", "default_noise_sampler", "BrownianTreeNoiseSampler"),
    # parallel_backend/denoise/step_cache.py
    *_of("step cache", "comfy_extras.nodes_easycache", "EasyCacheHolder", "LazyCacheHolder"),
    *_of("step cache", "comfy_extras.nodes_easycache", "easycache_forward_wrapper", "easycache_sample_wrapper"),
    *_of("step cache", "comfy_extras.nodes_easycache", "easycache_calc_cond_batch_wrapper"),
    *_of("step cache", "comfy_extras.nodes_easycache", "lazycache_predict_noise_wrapper"),
    # parallel_backend/weights/adapters/lora.py
    *_of("adapter", "comfy.lora", "calculate_weight"),
    *_of("adapter", "comfy.utils", "swap_scale_shift"),
    *(
        ReplacedFunction(f"comfy.weight_adapter.{name.lower()}", f"{name}Adapter.calculate_weight", "adapter")
        for name in ("LoRA", "LoHa", "LoKr", "GLoRA", "OFT")
    ),
    # functions that workers make from a node's code and its values (parallel_backend/models/comfyui/features)
    *_of("closure", "comfy_extras.nodes_cfg", "CFGNorm.execute", "CFGZeroStar.execute"),
    *_of("closure", "comfy_extras.nodes_eps", "EpsilonScaling.execute"),
    *_of("closure", "comfy_extras.nodes_nag", "NAGuidance.execute"),
    *_of("closure", "comfy_extras.nodes_slg", "SkipLayerGuidanceDiT.execute", "SkipLayerGuidanceDiTSimple.execute"),
    *_of("closure", "comfy_extras.nodes_freelunch", "FreeU.execute", "FreeU_V2.execute"),
)
