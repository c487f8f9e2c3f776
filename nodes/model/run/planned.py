"""A run under its plan, for which the devices have room."""

from __future__ import annotations

from dataclasses import dataclass

from ....parallel_backend.plan import ResolvedPlan
from ....parallel_backend.weights.adapters.lora import AdapterSet
from ..remote_model import RemoteModel


@dataclass(frozen=True)
class PlannedRun:
    """What a run goes by.

    Attributes:
        remote: the model in the workers.
        plan: how they share the run.
        adapters: what changes the weights.
        working: bytes that it takes of a device beside the model's weights.
        where: the plan and the attention's kernels, in words.
    """

    remote: RemoteModel
    plan: ResolvedPlan
    adapters: AdapterSet
    working: int
    where: str
