"""Communicators of a plan have distinct names, and axes with the same ranks share connections, which take GPU memory."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
import torch

from parallel_backend.comm.meter import Meter
from parallel_backend.mesh import Mesh, build_mesh
from parallel_backend.mesh_axes import PLAN_AXES, MeshAxis
from parallel_backend.plan import MeshCoordinates, ParallelPlan, ResolvedPlan
from parallel_backend.plan.predict.memory import connections
from tests.support.plans import cpu_plan
from tests.support.ranks import run_ranks

PAIRS = {
    "ulysses 3": (cpu_plan(ulysses=3), 2),
    "ring 3": (cpu_plan(ring=3), 2),
    "ring 2 x ulysses 2": (cpu_plan(ring=2, ulysses=2), 1 + 1 + 3),
    "cfg 2 x ulysses 2": (cpu_plan(cfg=2, ulysses=2), 1 + 1),
    "pipefusion 2": (cpu_plan(pipefusion=2), 1 + 1),
}
"""Plans, each with the number of pairs for which a rank's communicators keep buffers on a GPU."""


@pytest.mark.parametrize("name", PAIRS)
def test_axes_with_the_same_ranks_share_one_connection(name: str) -> None:
    plan, pairs = PAIRS[name]
    on_gpus = msgspec.structs.replace(plan, devices=tuple(f"cuda:{rank}" for rank in range(plan.world_size)))
    assert connections(on_gpus) == pairs

    def rank(number: int) -> tuple[bool, bool, list[float]]:
        mesh = build_mesh(plan, torch.device("cpu"), Meter())
        distinct = len(set(mesh.groups)) == len(mesh.groups)
        product = plan.ring > 1 and plan.ulysses > 1
        alone = mesh.sequence._group not in (mesh.ring._group, mesh.ulysses._group)
        ours = mesh.sequence.all_gather(torch.full((1, 1, 1), float(number)), [1] * mesh.sequence.size)
        mesh.close()
        return distinct, alone == product, ours.flatten().tolist()

    size = plan.ring * plan.ulysses
    for number, (distinct, right, gathered) in enumerate(run_ranks(plan.world_size, rank)):
        assert distinct and right
        assert gathered == [number // size * size + place for place in range(size)]


def test_plans_and_meshes_have_the_axes_of_the_enum() -> None:
    plan_axes = tuple(axis.value for axis in PLAN_AXES)
    assert MeshCoordinates._fields == plan_axes
    assert all({*plan_axes} <= {*plan.__struct_fields__} for plan in (ParallelPlan, ResolvedPlan))
    assert {field.name for field in dataclasses.fields(Mesh)} == {axis.value for axis in MeshAxis} | {"groups"}
    assert f"{MeshAxis.RING} {MeshAxis.RING!s}" == "ring ring"
