"""The weights a rank holds: loaded when first asked for, kept while they are the ones asked for."""

from __future__ import annotations

import gc
from itertools import accumulate

import torch
from torch.distributed.device_mesh import init_device_mesh

from ..comm.meter import Meter
from ..mesh import Mesh
from ..models import FAMILIES
from ..models.family import Model, ModelSpec, Stage
from ..plan import ResolvedPlan
from ..weights.checkpoint import DTYPES, read_header
from ..weights.holding import Holding, Replicated, Sharded
from ..weights.layers import materialise
from ..weights.loader import load_weights
from .status import Status

STORAGE_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values() if dtype.is_floating_point}


class Holder:
    """At most one model, or one stage of one, on one device."""

    def __init__(self, device: torch.device, status: Status, meter: Meter) -> None:
        self._device = device
        self._status = status
        self._meter = meter
        self._held: tuple[Model, Holding] | None = None
        self._what: object = None

    @property
    def nbytes(self) -> int:
        """Bytes of weights on the device."""
        parameters = self._held[0].module.parameters() if self._held else ()
        return sum(
            p.to_local().nbytes if isinstance(p, torch.distributed.tensor.DTensor) else p.nbytes for p in parameters
        )

    def hold(self, spec: ModelSpec, plan: ResolvedPlan, mesh: Mesh) -> tuple[Model, Holding]:
        """This rank's part of a model under a plan, loaded in place of another one if need be."""
        stage = _stage(plan, mesh)
        sharded_by = plan.world_size if plan.weights == "sharded" else 1
        what = (spec, stage, sharded_by)
        if self._held is None or self._what != what:
            self.release()
            self._held = self._load(spec, stage, sharded_by > 1)
            self._what = what
        return self._held

    def release(self) -> None:
        """Give the weights' memory back."""
        self._held = self._what = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _load(self, spec: ModelSpec, stage: Stage, sharded: bool) -> tuple[Model, Holding]:
        self._status.enter("loading the model")
        family = FAMILIES[spec.family]
        part, config = family.inspect(read_header(spec.path))
        model = family.build(config, stage)
        holding: Holding = Replicated()
        if sharded:
            model.module.to(STORAGE_DTYPES[spec.dtype])
            everyone = init_device_mesh(self._device.type, (torch.distributed.get_world_size(),))
            holding = Sharded(model.block_modules, everyone, self._meter)
        materialise(model.module, STORAGE_DTYPES[spec.dtype], self._device)
        load_weights(model.module, part, family.keys(config), lambda _: self._status.mark())
        return model, holding


def _stage(plan: ResolvedPlan, mesh: Mesh) -> Stage:
    ends = list(accumulate(plan.stages))
    stop = ends[mesh.pipefusion.rank]
    return Stage(stop - plan.stages[mesh.pipefusion.rank], stop, ends[-1])
