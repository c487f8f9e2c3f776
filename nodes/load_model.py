"""The nodes that load a diffusion model: one for all of ComfyUI's, and one for each of FLUX, CogVideoX and PixArt."""

from __future__ import annotations

from typing import ClassVar

from comfy_api.latest import io

from ..nodes import without_plan
from ..parallel_backend.plan import ParallelPlan
from ..parallel_backend.plan.plan import AUTOMATIC
from .model.build import WEIGHT_DTYPES, load_model
from .model.files import choices, fingerprint_of, path_of
from .parallel_plan import PlanType
from .runtime import CATEGORY, backend

WHERE = "A .safetensors or .gguf file in models/diffusion_models, a full checkpoint in models/checkpoints, or a diffusers folder."


class LoadParallelModel(io.ComfyNode):
    """A MODEL of one family whose weights live in worker processes, one a device."""

    FAMILY: ClassVar[str]
    KINDS: ClassVar[frozenset[str]] = frozenset()
    """What ComfyUI calls those of the family's models that this loader takes; empty for all."""

    @classmethod
    def schema(cls, name: str, models: str, files: str, aliases: list[str]) -> io.Schema:
        """Load Diffusion Model's inputs, and a plan.

        Args:
            name: the family's, as users know it.
            models: what this loader is for, in a sentence.
            files: which models can be chosen.
        """
        return io.Schema(
            node_id=cls.__name__,
            display_name=f"Load Parallel {name}",
            category=CATEGORY,
            description=f"{models} The same MODEL, denoised on several GPUs. The weights are loaded when first sampled.",
            search_aliases=[*aliases, "unet loader", "load diffusion model"],
            inputs=[
                io.Combo.Input("unet_name", options=choices(), tooltip=f"{files} {WHERE}"),
                io.Combo.Input(
                    "weight_dtype",
                    options=list(WEIGHT_DTYPES),
                    tooltip="The precision the weights are kept in; default does as ComfyUI's Load Diffusion Model. "
                    "Weights that are quantised in the file stay as they are.",
                ),
                PlanType.Input(
                    "plan",
                    optional=True,
                    tooltip="Which GPUs to use and how they share the work; without one, what Settings > Parallel says: unless "
                    "changed, those that are faster together.",
                ),
                without_plan.devices_input(),
                without_plan.preset_input(),
            ],
            outputs=[io.Model.Output(tooltip="Works with every sampler node.")],
        )

    @classmethod
    def fingerprint_inputs(cls, unet_name: str, **_: object) -> str:
        """A file that was replaced is loaded again."""
        return fingerprint_of(unet_name)

    @classmethod
    def execute(
        cls,
        unet_name: str,
        weight_dtype: str,
        plan: ParallelPlan | None = None,
        devices: str = without_plan.DEVICES,
        preset: str = AUTOMATIC,
    ) -> io.NodeOutput:
        """Check file and plan, and return the MODEL; no worker is started yet."""
        plan = without_plan.plan_of(backend(), plan, devices, preset)
        return io.NodeOutput(load_model(backend(), cls.FAMILY, path_of(unet_name), weight_dtype, plan, cls.KINDS))


ALIASES = [
    "multi gpu",
    "several gpus",
    "two gpus",
    "use all gpus",
    "parallel",
    "parallel wan",
    "parallel flux",
    "distributed",
    "raylight",
    "xdit",
    "fsdp",
    "wan",
    "qwen image",
    "z-image",
    "flux 2",
]
"""Words by which ComfyUI's node search finds this loader, where users with several GPUs start."""


class LoadParallelDiffusionModel(LoadParallelModel):
    """A MODEL of any family that the workers run, found from the file."""

    FAMILY = "comfyui"

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Load Diffusion Model's inputs and a plan, for these files."""
        models = (
            "Start here: takes the place of Load Diffusion Model for FLUX, Qwen-Image, Wan, Z-Image and many others."
        )
        files = "FLUX.1, FLUX.2, Qwen-Image, Wan 2.1 and 2.2, Z-Image, HunyuanVideo and a dozen other families."
        return cls.schema("Diffusion Model", models, files, ALIASES)


class LoadParallelFlux(LoadParallelModel):
    """A FLUX MODEL whose weights live in worker processes."""

    FAMILY = "comfyui"
    KINDS = frozenset({"Flux", "FluxInpaint", "FluxSchnell", "Flux2"})

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Load Diffusion Model's inputs and a plan, for these files."""
        models = "For FLUX.1 and FLUX.2 alone, which Load Parallel Diffusion Model takes too."
        files = "A FLUX.1 model (dev, schnell, Krea, Kontext, Fill, Canny or Depth) or a FLUX.2 model (dev or klein)."
        return cls.schema("FLUX", models, files, ["multi gpu flux", "load flux", "parallel flux"])


class LoadParallelCogVideoX(LoadParallelModel):
    """A CogVideoX MODEL whose weights live in worker processes."""

    FAMILY = "cogvideox"

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Load Diffusion Model's inputs and a plan, for these files."""
        models = "For CogVideoX alone, as its authors' own code runs it."
        files = "A CogVideoX 2b, 5b or 1.5-5B file, text or image to video, in models/diffusion_models."
        return cls.schema("CogVideoX", models, files, ["multi gpu video", "load cogvideox"])


class LoadParallelPixArt(LoadParallelModel):
    """A PixArt MODEL whose weights live in worker processes."""

    FAMILY = "pixart"

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Load Diffusion Model's inputs and a plan, for these files."""
        models = "For PixArt-alpha and PixArt-Sigma alone."
        files = "A PixArt-alpha or PixArt-Sigma file in models/diffusion_models."
        return cls.schema("PixArt", models, files, ["multi gpu pixart", "load pixart"])
