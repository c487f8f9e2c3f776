"""The nodes that load a diffusion model: one for all of ComfyUI's models, one each for FLUX, CogVideoX and PixArt."""

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
    """A node that loads a MODEL of one family. Worker processes hold the weights, one process per device."""

    FAMILY: ClassVar[str]
    KINDS: ClassVar[frozenset[str]] = frozenset()
    """ComfyUI's class names of the family's models that this loader accepts; empty for all."""

    @classmethod
    def schema(cls, name: str, models: str, files: str, aliases: list[str]) -> io.Schema:
        """Declare the inputs of Load Diffusion Model, and a plan.

        Args:
            name: the family's name, as users know it.
            models: a sentence that says which models this loader is for.
            files: the model files that can be chosen, in words.
            aliases: further words by which ComfyUI's node search finds the node.
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
                    tooltip="The precision of the weights in memory. default chooses as ComfyUI's Load Diffusion Model does. "
                    "Weights that are quantised in the file keep their format.",
                ),
                PlanType.Input(
                    "plan",
                    optional=True,
                    tooltip="Which GPUs to use and how they share the work. Without a plan, the devices and the preset of "
                    "Settings > Parallel apply: by default the GPUs that are faster together.",
                ),
                without_plan.devices_input(),
                without_plan.preset_input(),
            ],
            outputs=[io.Model.Output(tooltip="Works with every sampler node.")],
        )

    @classmethod
    def fingerprint_inputs(cls, unet_name: str, **_: object) -> str:
        """Return a fingerprint of the file, so that ComfyUI loads a replaced file again."""
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
        """Check the file and the plan, and return the MODEL. Start no worker yet."""
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
    """A node that loads a MODEL of any family that the workers run. The file's header tells the family."""

    FAMILY = "comfyui"

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Declare the inputs of Load Diffusion Model and a plan, for all families."""
        models = (
            "Start here: takes the place of Load Diffusion Model for FLUX, Qwen-Image, Wan, Z-Image and many others."
        )
        files = "FLUX.1, FLUX.2, Qwen-Image, Wan 2.1 and 2.2, Z-Image, HunyuanVideo and a dozen other families."
        return cls.schema("Diffusion Model", models, files, ALIASES)


class LoadParallelFlux(LoadParallelModel):
    """A node that loads a FLUX MODEL whose weights worker processes hold."""

    FAMILY = "comfyui"
    KINDS = frozenset({"Flux", "FluxInpaint", "FluxSchnell", "Flux2"})

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Declare the inputs of Load Diffusion Model and a plan, for FLUX files."""
        models = "For FLUX.1 and FLUX.2 only. Load Parallel Diffusion Model loads these models too."
        files = "A FLUX.1 model (dev, schnell, Krea, Kontext, Fill, Canny or Depth) or a FLUX.2 model (dev or klein)."
        return cls.schema("FLUX", models, files, ["multi gpu flux", "load flux", "parallel flux"])


class LoadParallelCogVideoX(LoadParallelModel):
    """A node that loads a CogVideoX MODEL whose weights worker processes hold."""

    FAMILY = "cogvideox"

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Declare the inputs of Load Diffusion Model and a plan, for CogVideoX files."""
        models = "For CogVideoX only, with the same results as its authors' own code."
        files = "A CogVideoX 2b, 5b or 1.5-5B file, text or image to video, in models/diffusion_models."
        return cls.schema("CogVideoX", models, files, ["multi gpu video", "load cogvideox"])


class LoadParallelPixArt(LoadParallelModel):
    """A node that loads a PixArt MODEL whose weights worker processes hold."""

    FAMILY = "pixart"

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Declare the inputs of Load Diffusion Model and a plan, for PixArt files."""
        models = "For PixArt-alpha and PixArt-Sigma only."
        files = "A PixArt-alpha or PixArt-Sigma file in models/diffusion_models."
        return cls.schema("PixArt", models, files, ["multi gpu pixart", "load pixart"])
