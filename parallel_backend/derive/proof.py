"""Proof of a declaration: a small model's own forward, plain and spread over ranks on the CPU."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from ..comm.meter import Meter
from ..mesh import build_mesh
from ..models.comfyui.features.compile import COMPILED
from ..models.family import Execution, Stage
from ..models.inputs import Inputs
from ..models.spread.blocks import SpreadModel, blocks_of
from ..models.spread.declaration import Declaration
from ..models.spread.picture import Picture, as_patch_size
from ..models.spread.run import SpreadForward
from ..plan import ResolvedPlan
from ..weights.stores.block_access import BlockAccess
from .calls import FAILS, ModelCall, Subject, in_a_line
from .ranks import run_ranks

TOLERANCE = 1e-5
"""The largest relative error (L2) of a forward that is right."""

CPU = torch.device("cpu")
WHOLE: Mapping[str, Mapping[str, int]] = {"ulysses 2": {"ulysses": 2}, "ring 3": {"ring": 3}}
IN_PATCHES: Mapping[str, Mapping[str, int]] = {"3 patches over 2 stages": {"pipefusion": 2, "patches": 3}}


@dataclass(frozen=True)
class Proof:
    """For each plan the worst relative error, or why it did not run."""

    errors: Mapping[str, float]
    failures: Mapping[str, str]

    @property
    def holds(self) -> bool:
        """Whether every plan gave the model's own result."""
        return not self.failures and self.holds_for(self.errors)

    def holds_for(self, plans: Collection[str]) -> bool:
        """Whether these did."""
        return all(self.errors.get(plan, math.inf) <= TOLERANCE for plan in plans)

    def told(self) -> str:
        """In words."""
        found = [f"{plan} {error:.1e}" for plan, error in self.errors.items()]
        return ", ".join([*found, *(f"{plan} failed ({why})" for plan, why in self.failures.items())])


def prove(
    subject: Subject,
    declaration: Declaration,
    calls: Sequence[ModelCall],
    plans: Mapping[str, Mapping[str, int]],
    limit: float,
) -> Proof:
    """Each call under each plan.

    Args:
        limit: seconds for a plan.
    """
    try:
        blocks = blocks_of(subject.model, declaration)
        expected = [call.of(subject.model) for call in calls]
    except FAILS as error:
        return Proof({}, {plan: in_a_line(error) for plan in plans})
    resolved = {name: _plan(blocks[-1].unit + 1, **degrees) for name, degrees in plans.items()}

    def work(plan: ResolvedPlan) -> list[float]:
        return [
            error
            for call, whole in zip(calls, expected, strict=True)
            for error in _errors(subject, declaration, call, plan, whole)
        ]

    results = {
        name: run_ranks(plan.world_size, functools.partial(work, plan), limit) for name, plan in resolved.items()
    }
    errors = {
        name: max((error for ranks in found for error in ranks), default=math.inf)
        for name, found in results.items()
        if not isinstance(found, str)
    }
    return Proof(errors, {name: found for name, found in results.items() if isinstance(found, str)})


@torch.inference_mode()
def _errors(
    subject: Subject, declaration: Declaration, call: ModelCall, plan: ResolvedPlan, expected: Tensor
) -> list[float]:
    """On a last stage's rank those of the whole call, and of its patches from the cache."""
    mesh = build_mesh(plan, CPU, Meter())
    ends = list(accumulate(plan.stages))
    stage = mesh.pipefusion.rank
    shared = {id(weight): weight for weight in subject.model.parameters()}
    spread = SpreadModel(
        copy.deepcopy(subject.model, shared),
        declaration,
        Stage(ends[stage] - plan.stages[stage], ends[stage], ends[-1]),
        COMPILED,
    )
    forward = SpreadForward(spread, Execution(mesh, plan, BlockAccess(), lambda: None))
    shape = tuple(call.latent.shape)
    picture = Picture(shape, as_patch_size(declaration.patch_size(subject.model), len(shape) - 2))
    inputs = Inputs("key", call.latent.shape, call.latent.dtype, CPU, None, {})

    def run(patch: int | None) -> Tensor | None:
        latent = call.latent.clone() if mesh.first else None
        out = forward.run(inputs, picture, latent, patch, lambda x, options: _at(call, x).of(spread.entrance, options))
        mesh.finish_sending()
        return out

    parts: list[Tensor | None] = [run(None)]
    if plan.patches > 1:
        patches = [found for found in (run(patch) for patch in range(plan.patches)) if found is not None]
        (region, *_) = picture.regions(plan.patches)
        parts.append(torch.cat(patches, dim=region.dim) if patches else None)
    errors = [float((out - expected).norm() / expected.norm()) for out in parts if out is not None]
    return [
        error if math.isfinite(error) else math.inf for error in errors
    ]  # no comparison holds for what is no number


def _at(call: ModelCall, latent: Tensor) -> ModelCall:
    return ModelCall(latent, call.timestep, call.arguments, call.options)


def _plan(blocks: int, pipefusion: int = 1, ring: int = 1, ulysses: int = 1, patches: int = 1) -> ResolvedPlan:
    ends = [blocks * stage // pipefusion for stage in range(pipefusion + 1)]
    settings: dict[str, Any] = {"warmup_steps": 1, "weights": "replicated", "attention": "auto", "memory_limit": 0.0}
    return ResolvedPlan(
        devices=("cpu",) * (pipefusion * ring * ulysses),
        data=1,
        cfg=1,
        pipefusion=pipefusion,
        ring=ring,
        ulysses=ulysses,
        patches=patches,
        stages=tuple(stop - start for start, stop in pairwise(ends)),
        shares=(1,) * (ring * ulysses),
        **settings,
    )
