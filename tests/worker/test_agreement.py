"""Ranks that received different requests report so before any of them begins."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist

from parallel_backend.diffusion import ModelSpec
from parallel_backend.plan import ResolvedPlan
from parallel_backend.worker.memory.files import ModelFiles
from parallel_backend.worker.process.environment import Environment, LaunchedWorker
from parallel_backend.worker.process.process_group import ProcessGroup
from parallel_backend.worker.process.status import RankProgress
from parallel_backend.worker.requests.engine import Agreement
from tests.support.plans import cpu_plan
from tests.support.ranks import run_ranks

PLAN = cpu_plan(ulysses=3)
MODEL = ModelSpec("comfyui", "a.safetensors", 1, 2, "float32")
NEWER = msgspec.structs.replace(MODEL, modified=3)


@pytest.mark.parametrize(
    ("asked", "rank"),
    [
        ([(PLAN, MODEL)] * 3, None),
        ([(PLAN, MODEL), (PLAN, MODEL), (PLAN, NEWER)], 2),
        ([(PLAN, MODEL), (cpu_plan(ring=3), MODEL), (PLAN, MODEL)], 1),
    ],
    ids=["the same", "another model", "another plan"],
)
def test_a_rank_that_received_another_plan_or_model_is_named(
    tmp_path: Path, asked: list[tuple[ResolvedPlan, ModelSpec]], rank: int | None
) -> None:
    def problems(rank: int) -> list[str]:
        environment = Environment(rank, 3, torch.device("cpu"), LaunchedWorker("", "", 1, -1, ""), (), "", None)
        group = ProcessGroup(environment, dist.FileStore(str(tmp_path / "store"), 3))
        agreement = Agreement(group, ModelFiles(()), RankProgress(), {})
        return [agreement.problem(*asked[rank]), agreement.problem(PLAN, NEWER)]

    host = re.escape(socket.gethostname())
    said = rf"Worker {rank} of 3 on {host} received plan and model \w{{16}} and worker 0 on {host} received \w{{16}}: "
    answers = run_ranks(3, problems, joined=False)
    assert len({first for first, _ in answers}) == 1
    for first, second in answers:
        assert re.match(said, first) if rank is not None else first == ""
        assert second == ""


def test_a_rank_whose_flash_attn_fails_declines_a_plan_with_flash(tmp_path: Path) -> None:
    refused = "attention flash cannot be used: flash-attn does not work on cuda:1; use auto or sdpa."

    def problems(rank: int) -> list[str]:
        environment = Environment(rank, 2, torch.device("cpu"), LaunchedWorker("", "", 1, -1, ""), (), "", None)
        group = ProcessGroup(environment, dist.FileStore(str(tmp_path / "store"), 2))
        agreement = Agreement(group, ModelFiles(()), RankProgress(), {"flash": refused} if rank == 1 else {})
        plan = cpu_plan(ulysses=2)
        plans = [msgspec.structs.replace(plan, attention=attention) for attention in ("flash", "auto", "sdpa")]
        return [agreement.problem(plan, MODEL) for plan in plans]

    assert run_ranks(2, problems, joined=False) == [[f"Worker 1 of 2: {refused}", "", ""]] * 2
