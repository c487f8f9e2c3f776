"""The record of the last run: its plan and the plans it was chosen from, each rank's costs, and its timeline."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ...attention.kernels import describe
from ...plan import ResolvedPlan
from ...plan.choose import PARTS, Ranked, is_approximate
from ...wire.to_host import RankCostReply
from ...wire.to_worker import (
    DecodeRequest,
    EncodeRequest,
    EncodeTextRequest,
    ForwardRequest,
    RunRequest,
    SampleRequest,
)
from ..planning.comparison import Denoise
from ..planning.planner import MeasuredChoice
from ..workers.pending_request import PendingRequest, RequestReply
from ..workers.status import Failure, model_name
from .calls import Calls
from .timeline import RunTimeline, timeline_of

KINDS = {
    SampleRequest: "sampling",
    ForwardRequest: "model calls one at a time",
    DecodeRequest: "decoding",
    EncodeRequest: "encoding",
    EncodeTextRequest: "encoding the prompt",
}


class Alternative(msgspec.Struct, frozen=True):
    """A plan with its predicted time and memory.

    Attributes:
        seconds: predicted seconds a step.
        parts: the parts of `seconds`, by name.
        memory: bytes that the tightest device needs.
        changes: True if the plan changes the picture.
    """

    plan: str
    devices: int
    chosen: bool
    seconds: float
    parts: dict[str, float]
    memory: float
    fits: bool
    changes: bool


class Decision(msgspec.Struct, frozen=True):
    """The choice of a plan, and its reason.

    Attributes:
        memory: bytes that each device had at least.
        single: the plan with one device alone.
    """

    why: str
    memory: float
    single: Alternative
    alternatives: list[Alternative]


class RankCost(msgspec.Struct, frozen=True):
    """Seconds and bytes of one rank in a run. The fields are those of RankCostReply."""

    rank: int
    device: str
    seconds: float
    waiting: float
    sent: dict[str, int]
    weights: int
    cache: int
    peak: int
    read: int


class RunRecord(msgspec.Struct, frozen=True):
    """The last finished run.

    Attributes:
        steps: 0 if the run has no steps.
        calls: model calls so far, of a run whose loop stays in ComfyUI; 0 for other runs.
        ended: seconds since the epoch.
        workflow: the id of the page's workflow; empty if unknown.
    """

    number: int
    kind: str
    model: str
    plan: str
    steps: int
    calls: int
    ended: float
    decision: Decision | None
    ranks: list[RankCost]
    timeline: RunTimeline
    workflow: str


@dataclass(frozen=True)
class _EndedRun:
    """A run that has ended.

    Attributes:
        message: the request.
        steps: steps of the denoise; 0 if there is none.
        calls: the calls of a loop that stayed in ComfyUI; None if the request is the whole run.
        reports: the costs on each rank.
        ended: seconds since 1970.
        chosen: the choice of the run's plan; None if the plan was not chosen automatically.
        workflow: the id of the page's workflow; empty if unknown.
    """

    message: RunRequest
    steps: int
    calls: Calls | None
    reports: Sequence[RankCostReply]
    ended: float
    chosen: MeasuredChoice | None
    workflow: str


class Journal:
    """The last run, kept as it was reported and made readable on request. Any thread may read while another writes."""

    def __init__(self) -> None:
        self.runs = 0
        self.failure: Failure | None = None
        self.denoise: Denoise | None = None
        """The last denoise whose loop ran in the workers."""
        self._last: _EndedRun | None = None
        self._begins = True

    def begins(self) -> None:
        """Record that a run begins: count the next model calls to it, and forget the last failure."""
        self._begins = True
        self.forget_failure()

    def forget_failure(self) -> None:
        """Forget the last failure, because a request begins."""
        self.failure = None

    def ran(self, exchange: PendingRequest, answer: RequestReply, latest: MeasuredChoice | None) -> None:
        """Record a finished run, and the choice of its plan if `latest` is that choice."""
        message, steps = exchange.message, 0
        assert isinstance(message, RunRequest)
        calls = self._calls(message) if isinstance(message, ForwardRequest) else None
        if calls is not None:
            calls.add(answer.reports)
        chosen = latest if latest is not None and latest.choice.plan == message.plan else None
        if isinstance(message, SampleRequest):
            self.denoise = Denoise.of(exchange, chosen)
            steps = len(exchange.tensors["sigmas"]) - 1
        reports, workflow = list(answer.reports), exchange.caller.workflow
        self._last = _EndedRun(message, steps, calls, reports, time.time(), chosen, workflow)
        self._begins = False
        self.runs += 1

    def _calls(self, message: ForwardRequest) -> Calls:
        """Return the calls of the run that a call belongs to."""
        last = self._last
        same = last is not None and (last.message.model, last.message.plan) == (message.model, message.plan)
        if last is None or last.calls is None or self._begins or not same:
            return Calls()
        return last.calls

    def failed(self, text: str) -> None:
        """Record that workers failed."""
        self.failure = Failure(text, time.time())

    def record(self) -> RunRecord | None:
        """Return the last run, or None before the first."""
        number, run = self.runs, self._last
        if run is None:
            return None
        plan = run.message.plan
        reports = run.calls.reports() if run.calls else run.reports
        return RunRecord(
            number=number,
            kind=KINDS[type(run.message)],
            model=model_name(run.message.model),
            plan=describe(plan),
            steps=run.steps,
            calls=len(run.calls) if run.calls else 0,
            ended=run.ended,
            decision=_decision(run.chosen) if run.chosen else None,
            ranks=[_cost(report, plan) for report in sorted(reports, key=lambda report: report.rank)],
            timeline=timeline_of(plan, reports),
            workflow=run.workflow,
        )


def _cost(report: RankCostReply, plan: ResolvedPlan) -> RankCost:
    return RankCost(
        rank=report.rank,
        device=plan.devices[report.rank],
        seconds=report.seconds,
        waiting=report.waiting,
        sent={kind: count for kind, count in sorted(report.sent.items()) if count},
        weights=report.weights,
        cache=report.cache,
        peak=report.peak,
        read=report.read,
    )


def _decision(chosen: MeasuredChoice) -> Decision:
    choice, memory = chosen.choice, chosen.memory

    def alternative(entry: Ranked) -> Alternative:
        parts = {part: getattr(entry.breakdown, part) for part in PARTS}
        return Alternative(
            plan=entry.plan.degrees,
            devices=entry.plan.world_size,
            chosen=entry.plan == choice.plan,
            seconds=entry.seconds,
            parts={part: seconds for part, seconds in parts.items() if seconds},
            memory=entry.breakdown.memory,
            fits=entry.breakdown.fits_into(memory),
            changes=is_approximate(entry.plan) or entry.plan.exchanges_approximately,
        )

    return Decision(
        choice.why, min(memory), alternative(choice.single), [alternative(ranked) for ranked in choice.ranking]
    )
