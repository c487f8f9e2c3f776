"""A rank's part of a diffusion model under a plan: one stage of its blocks, with whole, sharded or streamed weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import nn

from ...diffusion import ModelSpec
from ...models.comfyui.dynamic_loading import file_dtypes
from ...models.comfyui.fast_fp8 import multiply_in_fp8
from ...models.comfyui.features.lora import merging_dtype, rounded
from ...models.comfyui.meta_model import keep_type
from ...models.comfyui.model import ComfyModel
from ...models.families import family_of
from ...models.family import Stage, StageModel
from ...plan import ResolvedPlan
from ...weights.adapters.lora import AdapterSet
from ...weights.adapters.merging import Keep, Merging, Patching
from ...weights.files.checkpoint import read_header
from ...weights.formats import PLAIN
from ...weights.layers.packing import shape_parameters
from ...weights.layers.quantised import compute_in, plain_linears
from ...weights.loading.loader import WeightSource, load_weights
from ...weights.loading.reading import Neighbours, Watch
from ...weights.stores.store import BlockAccess, WeightStore

STORAGE_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in PLAIN if dtype.is_floating_point}


Arrange = Callable[[nn.Module, Sequence[nn.Module]], tuple[WeightStore, BlockAccess]]
"""A function that makes the weight store of a module with blocks, and the access to the blocks' weights."""


class StagePart:
    """One stage of a model, built on the meta device; a Part for the ModelHolder.

    Args:
        spec: the model.
        stage: the blocks of the stage.
        arrange: makes the weight store.
        device: the rank's device.
        neighbours: the ranks that load the weights together.
        watch: observes and cancels the loading.
        keep: decides which original weights stay in memory when adapters change them.
    """

    def __init__(
        self,
        spec: ModelSpec,
        stage: Stage,
        arrange: Arrange,
        device: torch.device,
        neighbours: Neighbours,
        watch: Watch,
        keep: Keep,
    ) -> None:
        family = family_of(spec)
        checkpoint, config = family.inspect(read_header(spec.path))
        dtype = STORAGE_DTYPES[spec.dtype]
        self._device = device
        self._neighbours = neighbours
        self._watch = watch
        self.model: StageModel = family.build(config, stage)
        self.module = self.model.module
        keep_type(self.module, dtype)
        compute = STORAGE_DTYPES[spec.compute]
        compute_in(self.module, compute)
        keys = family.keys(config)
        exact = dict.fromkeys(family.exact(config), torch.float32) | plain_linears(self.module, compute)
        if spec.dynamic:
            exact = file_dtypes(self.module, checkpoint, keys) | exact
        self._source = WeightSource(checkpoint, keys, dtype, exact)
        shape_parameters(self.module, checkpoint, keys, dtype, exact)
        if spec.fast_fp8 and isinstance(self.model, ComfyModel):
            multiply_in_fp8(self.module, device)
        self.store, self.access = arrange(self.module, self.model.block_modules)
        merging = Merging(dtype, exact, functools.partial(merging_dtype, spec.dynamic), rounded)
        names = family.comfyui_keys(config)
        self._patching = Patching(self.module, self.store, device, names, self._load, keep, merging)

    def fill(self) -> None:
        """Give the stage's weights memory and load them by byte ranges of the file."""
        self.store.materialise(self._device)
        self._load()
        self.store.settle()

    def adapt(self, adapters: AdapterSet, watch: Watch) -> None:
        """Set the weights to the file's weights with `adapters` applied. A collective."""
        self._watch = replace(watch, is_cancelled=lambda: False)  # half-restored weights would be useless
        self._patching.merge(adapters)
        self.store.settle()

    def _load(self, only: Collection[str] | None = None) -> None:
        load_weights(self.module, self.store, self._source, self._neighbours, self._watch, only)


def stages(plan: ResolvedPlan) -> tuple[Stage, ...]:
    """Return the stage of each rank."""
    ends = list(accumulate(plan.stages))
    numbers = (plan.coordinates(rank).pipefusion for rank in range(plan.world_size))
    return tuple(Stage(ends[number] - plan.stages[number], ends[number], ends[-1]) for number in numbers)
