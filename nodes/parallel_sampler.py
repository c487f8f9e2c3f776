"""The Parallel Sampler node."""

from __future__ import annotations

from typing import Any

import comfy.samplers
from comfy_api.latest import io

import nodes as comfy_nodes  # type: ignore[import-not-found]

from ..parallel_backend.errors import Refused
from .model.patcher import ParallelModelPatcher
from .runtime import CATEGORY


class ParallelSampler(io.ComfyNode):
    """A KSampler that runs the whole denoise in the workers, or refuses."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Declare KSampler's inputs."""
        return io.Schema(
            node_id="ParallelSampler",
            display_name="Parallel Sampler",
            category=CATEGORY,
            description="KSampler for a MODEL from a Load Parallel node: runs the whole denoise in the workers, or says "
            "why it cannot.",
            search_aliases=["multi gpu sampler", "ksampler", "xdit sampler", "distributed sampler", "speed up"],
            inputs=[
                io.Model.Input("model", tooltip="A MODEL from a Load Parallel node."),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    control_after_generate=True,
                    tooltip="The random seed of the noise.",
                ),
                io.Int.Input("steps", default=20, min=1, max=10000, tooltip="Steps of the denoise."),
                io.Float.Input(
                    "cfg",
                    default=1.0,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    round=0.01,
                    tooltip="Classifier-free guidance. 1 ignores the negative and is twice as fast; FLUX.1 dev and "
                    "schnell are made for 1.",
                ),
                io.Combo.Input(
                    "sampler_name",
                    options=comfy.samplers.KSampler.SAMPLERS,
                    tooltip="The algorithm of the denoise. All but dpm_adaptive run in the workers; KSampler runs dpm_adaptive "
                    "one model call at a time.",
                ),
                io.Combo.Input(
                    "scheduler",
                    options=comfy.samplers.KSampler.SCHEDULERS,
                    tooltip="How the noise falls over the steps.",
                ),
                io.Conditioning.Input("positive", tooltip="What the picture should show."),
                io.Conditioning.Input("negative", tooltip="What it should not show; unused at cfg 1."),
                io.Latent.Input("latent_image", tooltip="The latent to denoise."),
                io.Float.Input(
                    "denoise",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="How much is denoised; below 1 keeps the structure of the latent.",
                ),
            ],
            outputs=[io.Latent.Output(tooltip="The denoised latent.")],
        )

    @classmethod
    def validate_inputs(cls, sampler_name: str) -> bool:
        """Accept any sampler in the queue. `execute` then refuses a sampler that is not in the list, by its name."""
        return True

    @classmethod
    def execute(cls, model: Any, seed: int, steps: int, cfg: float, sampler_name: str, scheduler: str, positive: Any,
                negative: Any, latent_image: Any, denoise: float) -> io.NodeOutput:  # fmt: skip
        """Run ComfyUI's own KSampler on a copy of the MODEL that refuses instead of running step by step."""
        if not isinstance(model, ParallelModelPatcher):
            raise Refused(
                "Parallel Sampler takes a MODEL from a Load Parallel node: use such a loader, or the stock KSampler here."
            )
        latent = comfy_nodes.common_ksampler(
            model.strict(), seed, steps, cfg, sampler_name, scheduler, positive, negative, latent_image, denoise=denoise
        )
        return io.NodeOutput(*latent)
