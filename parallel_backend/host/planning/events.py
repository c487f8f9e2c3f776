"""What a backend tells, while it works, to the one who looks on: always in the thread that asked for the work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...plan import ResolvedPlan
from ...plan.choose import PlanChoice
from ...wire.to_host import RankCostReply
from .planner import PlanRequest


@dataclass(frozen=True)
class StartingEvent:
    """So many workers have been starting for some seconds."""

    workers: int
    seconds: float


@dataclass(frozen=True)
class MeasuringEvent:
    """Something that plans are chosen by is being measured, in words."""

    what: str


@dataclass(frozen=True)
class PlanEvent:
    """A question's answer, and the bytes that were free to each worker."""

    question: PlanRequest
    choice: PlanChoice
    memory: tuple[float, ...]


@dataclass(frozen=True)
class CostEvent:
    """What a request cost on each rank, in no order."""

    plan: ResolvedPlan
    reports: Sequence[RankCostReply]


Event = StartingEvent | MeasuringEvent | PlanEvent | CostEvent
OnEvent = Callable[[Event], None]


def ignore(_: Event) -> None:
    """What nobody wants to know."""
