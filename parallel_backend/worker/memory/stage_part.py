"""A rank's part of a denoiser under a plan: one stage of its blocks, whole or sharded."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import accumulate

import torch
from torch.distributed.device_mesh import init_device_mesh

from ...comm.meter import Meter
from ...denoise.stage import StageForward
from ...diffusion import ModelSpec
from ...mesh import Mesh
from ...models import FAMILIES
from ...models.comfyui.model import ComfyForward, ComfyModel
from ...models.family import Model, Stage
from ...plan import ResolvedPlan
from ...weights.adapters import AdapterSet
from ...weights.checkpoint import read_header
from ...weights.holding import Holding, Replicated, Sharded
from ...weights.loader import load_weights
from ...weights.packing import shape_parameters
from ...weights.patching import Keep, Patching
from ...weights.reading import Neighbours, Watch
from ...weights.storage import PLAIN

STORAGE_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in PLAIN if dtype.is_floating_point}


class StagePart:
    """One stage of a model, built on the meta device; a Part for the Holder.

    Args:
        stage: which blocks.
        sharded: whether all ranks share each block's weights.
        meter: counts the gathers of shards.
        neighbours, watch: with whom it is loaded, and who looks on.
        keep: what is kept of weights that adapters change.
    """

    def __init__(
        self,
        spec: ModelSpec,
        stage: Stage,
        sharded: bool,
        device: torch.device,
        meter: Meter,
        neighbours: Neighbours,
        watch: Watch,
        keep: Keep,
    ) -> None:
        family = FAMILIES[spec.family]
        self._checkpoint, config = family.inspect(read_header(spec.path))
        self._keys = family.keys(config)
        self._dtype = STORAGE_DTYPES[spec.dtype]
        self._device = device
        self._neighbours = neighbours
        self._watch = watch
        self.model: Model | ComfyModel = family.build(config, stage)
        self.module = self.model.module
        self._computed = {name: buffer for name, buffer in self.module.named_buffers() if not buffer.is_meta}
        self._exact = family.exact(config)
        shape_parameters(self.module, self._checkpoint, self._keys, self._dtype, self._exact)
        self.holding: Holding = Replicated()
        if sharded:
            everyone = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
            self.holding = Sharded(self.model.block_modules, everyone, meter)
        self._patching = Patching(self.module, family.comfyui_keys(config), self._load, keep)

    def fill(self) -> None:
        """Load the stage's weights by byte range."""
        self.module.to_empty(device=self._device)
        for name, buffer in self._computed.items():
            self.module.get_buffer(name).copy_(buffer)
        self._load()

    def adapt(self, adapters: AdapterSet, watch: Watch) -> None:
        """Make the weights those of the file with `adapters` in them. A collective."""
        self._watch = replace(watch, stop=lambda: False)  # weights restored by half would be nobody's
        self._patching.merge(adapters)

    def _load(self, only: Collection[str] | None = None) -> None:
        load_weights(
            self.module, self._checkpoint, self._keys, self._dtype, self._neighbours, self._watch, only, self._exact
        )


def forward_of(
    model: Model | ComfyModel, mesh: Mesh, plan: ResolvedPlan, holding: Holding, mark: Callable[[], None]
) -> StageForward | ComfyForward:
    """A model's forward under a plan."""
    if isinstance(model, ComfyModel):
        return model.forward_on(mesh, plan, holding, mark)
    return StageForward(model, mesh, plan, holding, mark)


def stages(plan: ResolvedPlan) -> tuple[Stage, ...]:
    """Each rank's stage."""
    ends = list(accumulate(plan.stages))
    numbers = (plan.place(rank).pipefusion for rank in range(plan.world_size))
    return tuple(Stage(ends[number] - plan.stages[number], ends[number], ends[-1]) for number in numbers)
