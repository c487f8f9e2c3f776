"""One rank's part of a small model's call."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ....comm.meter import Meter
from ....declaration import Declaration
from ....distance import error_of
from ....mesh import build_mesh
from ....mesh_axes import mesh_degrees
from ....plan import ParallelPlan, ResolvedPlan
from ....plan.resolve import in_rows
from ....weights.stores.store import BlockAccess
from ...family import Execution, Stage
from ...inputs import Inputs
from ...sequence_parallel.blocks import ParallelModel, blocks_of
from ...sequence_parallel.compiled import CompiledBlocks
from ...sequence_parallel.picture import Picture, as_patch_size
from ...sequence_parallel.run import ParallelForward
from ..features.compile import COMPILED
from ..small.case import Case, packed

CPU = torch.device("cpu")
ERRORS = msgspec.msgpack.Decoder(list[float])


class ProofRank:
    """One rank's part of a case: its pipeline stage of the model, its mesh and its picture."""

    def __init__(self, case: Case, plan: ResolvedPlan, declaration: Declaration | None = None) -> None:
        self.case = case
        self._plan = plan
        self.meter = Meter()
        self._mesh = build_mesh(plan, CPU, self.meter)
        ends = list(accumulate(plan.stages))
        stage = self._mesh.pipefusion.rank
        part = Stage(ends[stage] - plan.stages[stage], ends[stage], ends[-1])
        shared = {id(weight): weight for weight in case.model.parameters()}
        self.model = ParallelModel(copy.deepcopy(case.model, shared), declaration or case.declaration, part, COMPILED)
        self.module, self.blocks = self.model.module, self.model.blocks
        self.hold(BlockAccess())
        shape = case.shapes[0] if case.shapes else tuple(case.x.shape)
        picture = Picture(shape, as_patch_size(case.declaration.patch_size(case.model), len(shape) - 2))
        self.picture = picture.with_concatenated(case.arguments.get(case.declaration.concatenated_latent))

    def hold(self, access: BlockAccess, compiled: CompiledBlocks | None = None) -> None:
        """Replace the access to the blocks' weights, and compile the blocks if `compiled` is given."""
        self.forward = ParallelForward(self.model, Execution(self._mesh, self._plan, access, lambda: None), compiled)

    @torch.inference_mode()
    def run(self, patch: int | None = None, **changed: Any) -> Tensor | None:
        """Return the output for the whole picture, or for one patch, on a rank of the last stage; None on other ranks."""
        case = self.case

        def compute(x: Tensor, options: Any) -> Tensor:
            out = self.model.entrance(
                case.unpacked(x),
                case.timestep,
                transformer_options={**options, **case.options},
                **tree_map_only(Tensor, torch.clone, {**case.arguments, **changed}),
            )
            return packed(out)

        latent = case.x.clone() if self._mesh.reads_latent else None
        inputs = Inputs("key", case.x.shape, case.x.dtype, CPU, None, {})
        out = self.forward.run(inputs, self.picture, latent, patch, compute)
        self._mesh.finish_sending()
        return out

    def by_patch(self) -> Tensor | None:
        """Return the joined outputs of all patches, from a cache that holds the whole call.

        Returns:
            None if the plan has one patch, and on ranks of other stages than the last.
        """
        if self._plan.patches == 1:
            return None
        parts = [self.run(patch) for patch in range(self._plan.patches)]
        (region, *_) = self.picture.regions(self._plan.patches)
        outputs = [part for part in parts if part is not None]
        return torch.cat(outputs, dim=region.dim) if outputs else None


def plan_for(case: Case, **degrees: Any) -> ResolvedPlan:
    """Return a plan with these degrees and fields, with as many CPU ranks as it needs and blocks divided into equal stages."""
    fields = mesh_degrees(**degrees)
    sequence, stages = fields["ring"] * fields["ulysses"], fields["pipefusion"]
    blocks = blocks_of(case.model, case.declaration)[-1].unit + 1
    ends = [blocks * stage // stages for stage in range(stages + 1)]
    stated = {
        "patches": stages,
        "shares": (1,) * sequence,
        "stages": tuple(stop - start for start, stop in pairwise(ends)),
        "warmup_steps": 1,
    }
    devices = ("cpu",) * (fields["data"] * fields["cfg"] * stages * sequence)
    return msgspec.structs.replace(in_rows(ParallelPlan(), devices), **{**stated, **fields})


def errors_of(outs: Iterable[Tensor], expected: Tensor) -> bytes:
    """Return a rank's relative errors as bytes, for `worst`."""
    return msgspec.msgpack.encode([error_of(out, expected) for out in outs])


def worst(ranks: Iterable[bytes]) -> float:
    """Return the largest error of all ranks.

    Raises:
        RuntimeError: no rank has a result.
    """
    errors = [error for rank in ranks for error in ERRORS.decode(rank)]
    if not errors:
        raise RuntimeError("no rank has a result")
    return max(errors)
