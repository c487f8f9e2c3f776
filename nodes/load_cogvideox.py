"""The Load Parallel CogVideoX node."""

from __future__ import annotations

from comfy_api.latest import io

from .load_model import LoadParallelModel


class LoadParallelCogVideoX(LoadParallelModel):
    """A CogVideoX MODEL whose weights live in worker processes."""

    FAMILY = "cogvideox"

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Load Diffusion Model's inputs and a plan, for these files."""
        models = "For CogVideoX alone, as its authors' own code runs it."
        files = "A CogVideoX 2b, 5b or 1.5-5B file, text or image to video, in models/diffusion_models."
        return cls.schema("CogVideoX", models, files, ["multi gpu video", "load cogvideox"])
