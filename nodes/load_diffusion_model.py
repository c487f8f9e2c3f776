"""The Load Parallel Diffusion Model node."""

from __future__ import annotations

from comfy_api.latest import io

from .load_model import LoadParallelModel


class LoadParallelDiffusionModel(LoadParallelModel):
    """A MODEL of any family that the workers run, found from the file."""

    FAMILY = "comfyui"

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Load Diffusion Model's inputs and a plan, for these files."""
        files = "FLUX.1, FLUX.2, Qwen-Image, Wan 2.1 and 2.2, Z-Image, HunyuanVideo and a dozen other families."
        return cls.schema("Diffusion Model", files, ["multi gpu", "wan", "qwen image", "z-image", "flux 2"])
