"""The Load Parallel FLUX node."""

from __future__ import annotations

from comfy_api.latest import io

from .load_model import LoadParallelModel


class LoadParallelFlux(LoadParallelModel):
    """A FLUX MODEL whose weights live in worker processes."""

    FAMILY = "flux"

    @classmethod
    def define_schema(cls) -> io.Schema:
        """As all loaders."""
        files = "A FLUX.1 dev or schnell file in models/diffusion_models."
        return cls.schema("FLUX", files, ["multi gpu flux", "load flux"])
