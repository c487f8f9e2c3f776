"""Proof of a declaration: the forward of a small model, run on one rank and run in parallel over CPU ranks."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..declaration import Declaration
from ..models.comfyui.features import compile as features
from ..models.comfyui.proof.prove import TOLERANCE
from ..models.comfyui.proof.rank import ProofRank, errors_of, plan_for, worst
from ..models.comfyui.proof.ranks import RankFailed, in_a_line, run_in_turn
from ..models.comfyui.small import Case
from ..models.sequence_parallel.compiled import CompiledBlocks
from ..plan import ResolvedPlan
from ..weights.stores.store import BlockAccess
from .calls import FAILS, ModelCall, Subject

WHOLE: Mapping[str, Mapping[str, int]] = {"ulysses 2": {"ulysses": 2}, "ring 3": {"ring": 3}}
COMPILED: Mapping[str, Mapping[str, int]] = {"ulysses 2, compiled": {"ulysses": 2}}
COMPILER = "aot_eager"
"""A compiler that traces blocks as every compiler does, and runs the traced graph unchanged."""
IN_PATCHES: Mapping[str, Mapping[str, int]] = {"3 patches over 2 stages": {"pipefusion": 2, "patches": 3}}


@dataclass(frozen=True)
class DeclarationProof:
    """The largest relative error of each plan that ran, and the reason of each plan that did not run."""

    errors: Mapping[str, float]
    failures: Mapping[str, str]

    @property
    def holds(self) -> bool:
        """Return True if every plan gave the result of the unsharded model."""
        return not self.failures and self.holds_for(self.errors)

    def holds_for(self, plans: Collection[str]) -> bool:
        """Return True if these plans gave the result of the unsharded model."""
        return all(self.errors.get(plan, math.inf) <= TOLERANCE for plan in plans)

    def in_words(self) -> str:
        """Return each plan with its error, or with the reason of its failure."""
        errors = [f"{plan} {error:.1e}" for plan, error in self.errors.items()]
        return ", ".join([*errors, *(f"{plan} failed ({why})" for plan, why in self.failures.items())])


def prove(
    subject: Subject,
    declaration: Declaration,
    calls: Sequence[ModelCall],
    plans: Mapping[str, Mapping[str, int]],
    limit: float,
    compiler: str = "",
) -> DeclarationProof:
    """Run each call under each plan, and compare the results with the unsharded model's.

    Args:
        limit: seconds for one plan.
        compiler: compiles the blocks; empty for none. A kind of block that the compiler does not accept is a failure.
    """
    cases = [_case(subject, declaration, call) for call in calls]
    try:
        resolved = {name: plan_for(cases[0], **degrees) for name, degrees in plans.items()}
        expected = [case.stock() for case in cases]
    except FAILS as error:
        return DeclarationProof({}, {plan: in_a_line(error) for plan in plans})
    errors, failures = {}, {}
    for name, plan in resolved.items():
        works = [
            (plan.world_size, functools.partial(_on_rank, case, plan, whole, compiler))
            for case, whole in zip(cases, expected, strict=True)
        ]
        try:
            errors[name] = max(map(worst, run_in_turn(works, limit / len(works))))
        except RankFailed as failed:
            failures[name] = failed.line
    return DeclarationProof(errors, failures)


def _case(subject: Subject, declaration: Declaration, call: ModelCall) -> Case:
    return Case(subject.model, declaration, call.latent, call.timestep, call.arguments, "", options=call.options)


@torch.inference_mode()
def _on_rank(case: Case, plan: ResolvedPlan, expected: Tensor, compiler: str, _: int) -> bytes:
    """Return, on a rank of the last stage, the errors of the call of the whole picture and of its patches from the cache."""
    os.dup2(
        os.open(os.devnull, os.O_WRONLY), 2
    )  # with a wrong declaration, gloo may end the process with a page of output
    rank = ProofRank(case, plan)
    if compiler:
        rank.hold(BlockAccess(), CompiledBlocks(compiler, features.COMPILED))
    outs = [out for out in (rank.run(), rank.by_patch()) if out is not None]
    if uncompiled := rank.forward.uncompiled():
        raise RuntimeError(uncompiled[0])
    return errors_of(outs, expected)
