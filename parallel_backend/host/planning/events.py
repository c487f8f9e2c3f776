"""Events that a backend reports to its observer while it works, always in the thread that asked for the work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...plan import ResolvedPlan
from ...plan.choose import PlanChoice
from ...wire.to_host import RankCostReply
from .planner import PlanRequest


@dataclass(frozen=True)
class StartingEvent:
    """The start of `workers` workers, which has taken `seconds` so far."""

    workers: int
    seconds: float


@dataclass(frozen=True)
class MeasuringEvent:
    """The start of a measurement by which plans are chosen. `what` names it in words."""

    what: str


@dataclass(frozen=True)
class PlanEvent:
    """The answer to a request for a plan, and the bytes that were free to each worker."""

    question: PlanRequest
    choice: PlanChoice
    memory: tuple[float, ...]


@dataclass(frozen=True)
class CostEvent:
    """The costs of a request on each rank, in no order."""

    plan: ResolvedPlan
    reports: Sequence[RankCostReply]


Event = StartingEvent | MeasuringEvent | PlanEvent | CostEvent
OnEvent = Callable[[Event], None]


def ignore(_: Event) -> None:
    """Ignore an event."""
