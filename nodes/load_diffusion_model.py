"""The Load Parallel Diffusion Model node."""

from __future__ import annotations

from comfy_api.latest import io

from .load_model import LoadParallelModel

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
"""What people look for who have several GPUs: this loader is where they start."""


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
