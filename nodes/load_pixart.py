"""The Load Parallel PixArt node."""

from __future__ import annotations

from comfy_api.latest import io

from .load_model import LoadParallelModel


class LoadParallelPixArt(LoadParallelModel):
    """A PixArt MODEL whose weights live in worker processes."""

    FAMILY = "pixart"

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Load Diffusion Model's inputs and a plan, for these files."""
        models = "For PixArt-alpha and PixArt-Sigma alone."
        files = "A PixArt-alpha or PixArt-Sigma file in models/diffusion_models."
        return cls.schema("PixArt", models, files, ["multi gpu pixart", "load pixart"])
