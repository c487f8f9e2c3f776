"""Noise of samplers over real ranks: one rank draws for all, so that ranks whose generators differ agree."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from parallel_backend.comm.meter import Meter
from parallel_backend.denoise.noise import Draw, LatentNoise, Share, SharedNoise
from parallel_backend.denoise.program import Program
from parallel_backend.layout import cut
from parallel_backend.mesh import build_mesh
from parallel_backend.models.sequence_parallel.picture import Picture
from parallel_backend.plan import ResolvedPlan
from tests.denoise.comparing import replayed, smooth
from tests.support.plans import cpu_plan
from tests.support.programs import program_of
from tests.support.ranks import run_ranks
from tests.support.selection import thorough

SHAPE = (3, 2, 5, 4)
SIGMAS = torch.linspace(1, 0, 5)
SAMPLERS = ("euler_ancestral", "dpmpp_sde", "seeds_2", "lcm")


def run(program: Program, x: Tensor, share: Share) -> Tensor:
    """Return a sampler's result with a model that works on each element separately."""
    return replayed(program, x, LatentNoise(SHAPE, x.device, share), smooth).result


@pytest.mark.filterwarnings("ignore:Should have t:UserWarning")
@pytest.mark.parametrize(
    ("plan", "drawing"),
    [
        # the next cases have each axis but ring, whose ranks share noise as those of ulysses do
        pytest.param(cpu_plan(data=2, cfg=2, ring=2), 0, marks=thorough),
        (cpu_plan(cfg=2, pipefusion=2, ulysses=2, patches=2), 2),
        (cpu_plan(data=2, pipefusion=2, patches=3), 1),
        (cpu_plan(), 0),
    ],
    ids=lambda value: value.degrees if isinstance(value, ResolvedPlan) else f"rank {value} draws",
)
def test_ranks_with_different_generators_agree(plan: ResolvedPlan, drawing: int) -> None:
    """Different seeds stand for the generators of different kinds of cards."""
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    runs, patches = cut(SHAPE[0], plan.data), Picture(SHAPE, (2, 2)).regions(plan.patches)

    programs = {
        rank: [program_of(name, SIGMAS, torch.empty(SHAPE), seed=7 + 100 * rank) for name in SAMPLERS]
        for rank in range(plan.world_size)
    }

    def on_rank(rank: int) -> tuple[int, list[Tensor], dict[str, int]] | None:
        meter = Meter()
        mesh = build_mesh(plan, torch.device("cpu"), meter)
        if not mesh.is_last_stage:
            return None
        results = [
            run(program, patch.of(x[runs[mesh.data.rank]]), SharedNoise(mesh, SHAPE, runs, patch))
            for program in programs[rank]
            for patch in patches
        ]
        return mesh.data.rank, results, dict(meter.sent)

    draws: list[Draw] = []

    def counted(draw: Draw) -> Tensor:
        draws.append(draw)
        return draw()

    expected = [run(program, x, counted) for program in programs[drawing]]
    answers = [answer for answer in run_ranks(plan.world_size, on_rank) if answer is not None]
    for data, results, _ in answers:
        parts = [patch.of(latent[runs[data]]) for latent in expected for patch in patches]
        assert all(torch.equal(*pair) for pair in zip(results, parts, strict=True))
    received = sum(x[runs[data]].nbytes for data, *_ in answers) - x[runs[0]].nbytes  # one rank keeps its own draw
    sent = sum((Counter(sent) for *_, sent in answers), Counter())
    assert sent == ({"noise": len(draws) * received} if received else {})
