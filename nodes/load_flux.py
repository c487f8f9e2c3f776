"""The Load Parallel FLUX node."""

from __future__ import annotations

from comfy_api.latest import io

from .load_model import LoadParallelModel


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
