"""The arguments of a run, as a SAMPLER_SAMPLE wrapper receives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class SamplerRun:
    """The arguments of a SAMPLER_SAMPLE wrapper."""

    sampler: Any
    guider: Any
    sigmas: Tensor
    extra_args: Mapping[str, Any]
    noise: Tensor
    latent: Tensor
    mask: Tensor | None

    @property
    def model_options(self) -> Mapping[str, Any]:
        """Return ComfyUI's model options, of the MODEL and the sampler."""
        return self.extra_args["model_options"]  # type: ignore[no-any-return]

    @property
    def transformer_options(self) -> Mapping[str, Any]:
        """Return the model options that the diffusion model reads."""
        return self.model_options.get("transformer_options", {})  # type: ignore[no-any-return]
