"""A run with its plan, for which the devices have enough free memory."""

from __future__ import annotations

from dataclasses import dataclass

from ....parallel_backend.plan import ResolvedPlan
from ....parallel_backend.weights.adapters.lora import AdapterSet
from ..remote_model import RemoteModel


@dataclass(frozen=True)
class PlannedRun:
    """The model, plan and memory of a run.

    Attributes:
        remote: the model in the workers.
        plan: the division of the run over the workers.
        adapters: the changes of the weights.
        working: bytes that the run needs on a device besides the model's weights.
        where: the plan and the attention kernels, in words.
    """

    remote: RemoteModel
    plan: ResolvedPlan
    adapters: AdapterSet
    working: int
    where: str
