"""Plans for tests of a parallel forward, its outputs, and the largest error allowed against the model's own forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from parallel_backend.comm.meter import Meter
from parallel_backend.distance import error_of
from parallel_backend.models.comfyui.proof.rank import CPU, ProofRank
from parallel_backend.models.comfyui.small import Case
from parallel_backend.plan import ResolvedPlan
from parallel_backend.weights.stores.sharded import Sharded
from parallel_backend.weights.stores.streamed import Streamed
from tests.support.comfy_oracle import comfy_on_path
from tests.support.rank_parts import everyone
from tests.support.ranks import OnRank, run_in_turn

comfy_on_path()


TOLERANCE = 1e-5
PLANS = {
    "ulysses 2": {"ulysses": 2},
    "ring 3": {"ring": 3},
    "ring 2, ulysses 2": {"ring": 2, "ulysses": 2},
    "3 patches over 2 stages, ulysses 2": {"pipefusion": 2, "patches": 3, "ulysses": 2},
    "2 patches over 3 stages": {"pipefusion": 3, "patches": 2},
    "ring 2, ulysses 2, unequal": {"ring": 2, "ulysses": 2, "shares": (100, 61, 45, 20)},
}


def worst(results: list[list[Tensor]], expected: Tensor) -> float:
    """Return the largest relative error of all ranks' outputs. At least one rank must have an output."""
    assert any(results)
    return max(error_of(out, expected) for outs in results for out in outs)


def outputs_in_turn(
    case: Case,
    plans: Sequence[ResolvedPlan],
    prepare: Callable[[ProofRank], object] = lambda rank: None,
) -> list[list[list[Tensor]]]:
    """Return for each plan each rank's outputs: the whole call's and, with several patches, that of all patches joined.

    Ranks of the last stage have outputs. Patches are computed with a cache of the same call.

    Args:
        prepare: called with each rank before its call.
    """

    return outputs_of_each([(case, plan) for plan in plans], prepare)


def outputs_of_each(
    calls: Sequence[tuple[Case, ResolvedPlan]], prepare: Callable[[ProofRank], object] = lambda rank: None
) -> list[list[list[Tensor]]]:
    """Do as `outputs_in_turn` for several cases, each with a plan."""

    def of(case: Case, plan: ResolvedPlan) -> tuple[int, OnRank]:
        def on_rank(_: int) -> list[Tensor]:
            rank = ProofRank(case, plan)
            prepare(rank)
            found = rank.run(), rank.by_patch()
            return [out for out in found if out is not None]

        return plan.world_size, on_rank

    return run_in_turn([of(case, plan) for case, plan in calls])


def outputs(
    case: Case, plan: ResolvedPlan, prepare: Callable[[ProofRank], object] = lambda rank: None
) -> list[list[Tensor]]:
    """Do as `outputs_in_turn` for one plan."""
    return outputs_in_turn(case, [plan], prepare)[0]


def share_weights(rank: ProofRank, *, streamed: bool = False) -> Sharded | Streamed:
    """Let every rank hold its part of each block, on its device or, if `streamed`, in host memory. Return the store."""
    values = {name: parameter.detach().clone() for name, parameter in rank.module.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in rank.module.named_buffers()}
    store: Sharded | Streamed
    if streamed:
        store = Streamed(rank.module, rank.blocks, everyone("weights"), CPU, Meter())
    else:
        store = Sharded(rank.module, rank.blocks, everyone("weights"))
    store.materialise(CPU)
    for name, value in values.items():
        run = store.run(name)
        run.values.copy_(value.view(-1)[run.start : run.stop])
    for name, buffer in buffers.items():
        rank.module.get_buffer(name).copy_(buffer)
    store.settle()
    rank.hold(store)
    return store
