"""A stage receives the next patch's tokens while it computes one."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_backend.comm.meter import Meter
from parallel_backend.mesh import build_mesh
from parallel_backend.models.inputs import PatchForward
from parallel_backend.models.sequence_parallel.arrivals import Arrivals
from tests.support.plans import cpu_plan
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
CALLS, PATCHES, STAGES = 3, 2, 3
TOKENS = torch.Size((1, 100_000, 8))
"""The number of values in a message so large that gloo sends it only after the receiver has begun to receive."""


def tokens(call: int, patch: int) -> Tensor:
    return torch.full(TOKENS, float(10 * call + patch))


def test_a_stage_receives_the_next_patch_while_it_computes() -> None:
    """The first stage continues as soon as a patch has left, while later stages still compute the previous patch.

    A stage in the middle sends while it receives.
    """
    plan = cpu_plan(pipefusion=STAGES, patches=PATCHES)

    def on_rank(rank: int) -> list[Tensor]:
        mesh = build_mesh(plan, CPU, Meter())
        arrivals = Arrivals(mesh)
        found = []
        for call in range(CALLS):
            for patch in range(PATCHES):
                behind = PatchForward("key", patch + 1) if patch + 1 < PATCHES else None
                arrivals.enter(PatchForward("key", patch), behind)
                if rank == 0:
                    mesh.to_next_stage.send(tokens(call, patch), 1)
                    if call and behind is None:
                        mesh.finish_sending()
                        mesh.cancel_flag.send(torch.ones(1), 1)
                    continue
                taken = arrivals.take(TOKENS, torch.float32)
                found.append(taken.flatten()[:1])
                if rank == 1 and call and behind is not None:
                    mesh.cancel_flag.receive((1,), torch.float32, 0)  # the next patch has come
                if rank + 1 < STAGES:
                    mesh.to_next_stage.send(taken, rank + 1)
        mesh.finish_sending()
        return found

    results = run_ranks(STAGES, on_rank)
    expected = [tokens(call, patch).flatten()[:1] for call in range(CALLS) for patch in range(PATCHES)]
    assert all(torch.equal(torch.cat(found), torch.cat(expected)) for found in results[1:])
