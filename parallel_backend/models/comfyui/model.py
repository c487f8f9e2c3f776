"""One stage of a model of ComfyUI's in a worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...mesh import Mesh
from ...plan import ResolvedPlan
from ..family import Stage
from ..inputs import Inputs
from ..region import Region
from ..spread.blocks import SpreadModel
from ..spread.declaration import Declaration
from ..spread.picture import Picture, as_patch_size
from ..spread.run import SpreadForward
from .conditioning import arguments

if TYPE_CHECKING:
    from ...weights.holding import Holding  # which imports what only workers need


class ComfyModel:
    """ComfyUI's diffusion model, its blocks spread; ComfyUI's own code around it.

    Args:
        base: ComfyUI's BaseModel on the meta device.
        stage: the units of blocks that this rank holds.
    """

    def __init__(self, base: Any, declaration: Declaration, stage: Stage) -> None:
        self.module: nn.Module = base.diffusion_model
        self._base = base
        self._patch_size = declaration.patch_size(self.module)
        self._spread = SpreadModel(self.module, declaration, stage)
        self.block_modules: Sequence[nn.Module] = self._spread.blocks

    def patches(self, latent_shape: Sequence[int], count: int) -> tuple[Region, ...]:
        """The latent's part of each patch."""
        return self.picture(latent_shape).regions(count)

    def picture(self, latent_shape: Sequence[int]) -> Picture:
        """The tokens of a latent."""
        return Picture(tuple(latent_shape), as_patch_size(self._patch_size, len(latent_shape) - 2))

    def forward_on(self, mesh: Mesh, plan: ResolvedPlan, holding: Holding, mark: Callable[[], None]) -> ComfyForward:
        """Its forward under a plan."""
        return ComfyForward(self, SpreadForward(self._spread, mesh, plan, holding, mark))

    def compute(self, latent: Tensor, inputs: Inputs, options: Mapping[str, Any]) -> Tensor:
        """What ComfyUI's BaseModel does around its diffusion model, whose output this is.

        Args:
            latent: as the model is to see it, in the compute dtype.
        """
        given = arguments(inputs.conditioning, inputs.values)
        concat, context = given.pop("concat", None), given.pop("context", None)
        timestep = inputs.timestep
        if not inputs.processed:
            timestep = self._base.process_timestep(timestep, x=latent, **given)
        x = latent if concat is None else torch.cat([latent, concat], dim=1)
        out: Tensor = self._spread.entrance(x, timestep, context=context, transformer_options=dict(options), **given)
        return out


class ComfyForward:
    """Runs a ComfyModel's stage; see SpreadForward."""

    def __init__(self, model: ComfyModel, forward: SpreadForward) -> None:
        self._model = model
        self._forward = forward

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values kept."""
        return self._forward.cache_bytes

    def __call__(self, inputs: Inputs, latent: Tensor | None, patch: int | None) -> Tensor | None:
        """On the last stage the output for the whole latent, or for the patch; None on the others."""
        return self._forward.run(
            inputs.key,
            self._model.picture(inputs.shape),
            latent,
            inputs.dtype,
            inputs.device,
            patch,
            lambda x, options: self._model.compute(x, inputs, options),
        )
