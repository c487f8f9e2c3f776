"""What a backend tells, while it works, to the one who looks on: always in the thread that asked for the work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...plan import ResolvedPlan
from ...plan.choose import Choice
from ...wire.to_host import RankCostReply
from .planner import Question


@dataclass(frozen=True)
class Starting:
    """So many workers have been starting for some seconds."""

    workers: int
    seconds: float


@dataclass(frozen=True)
class Measuring:
    """Something that plans are chosen by is being measured, in words."""

    what: str


@dataclass(frozen=True)
class Planned:
    """A question's answer, and the bytes that were free to each worker."""

    question: Question
    choice: Choice
    memory: tuple[float, ...]


@dataclass(frozen=True)
class Ran:
    """What a request cost on each rank, in no order."""

    plan: ResolvedPlan
    reports: Sequence[RankCostReply]


Event = Starting | Measuring | Planned | Ran
OnEvent = Callable[[Event], None]


def ignore(_: Event) -> None:
    """What nobody wants to know."""
