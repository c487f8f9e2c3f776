"""The Load Parallel FLUX node."""

from __future__ import annotations

from comfy_api.latest import io

from ..parallel_backend.models.flux import is_flux2
from ..parallel_backend.weights.checkpoint import read_header
from .load_model import LoadParallelModel


class LoadParallelFlux(LoadParallelModel):
    """A FLUX MODEL whose weights live in worker processes."""

    FAMILY = "flux"

    @classmethod
    def define_schema(cls) -> io.Schema:
        """As all loaders."""
        files = "A FLUX.1 model (dev, schnell, Krea, Kontext, Fill, Canny or Depth) or a FLUX.2 model (dev or klein)."
        return cls.schema("FLUX", files, ["multi gpu flux", "load flux"])

    @classmethod
    def family_of(cls, path: str) -> str:
        """FLUX.2 runs as ComfyUI's own model."""
        return "comfyui" if is_flux2(read_header(path)) else cls.FAMILY
