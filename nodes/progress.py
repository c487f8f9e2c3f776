"""What a person sees of a run: a line on the node while it works, and what it came to afterwards.

All that is told comes from the Backend and the nodes in the thread that executes the node, and goes to ComfyUI's server.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
from comfy.model_management import InterruptProcessingException
from comfy_execution.progress import get_progress_state
from comfy_execution.utils import get_executing_context
from server import PromptServer

from ..parallel_backend.errors import NotFinite, Refused, RequestFailed, WorkerFailed
from ..parallel_backend.host.planning.events import CostEvent, Event, MeasuringEvent, PlanEvent, StartingEvent
from ..parallel_backend.host.runs.outcome import Outcome, RunTimes, in_words, outcome, part_of

EVENT = "parallel.ran"
"""Told to the page, with the node's id, when a run has ended well."""

HISTORY = "parallel"
"""Where a prompt's extra data, which ComfyUI keeps in its history, has the outcomes, by the node's id."""

OURS = Refused, NotFinite, RequestFailed, WorkerFailed
"""Errors that are sentences for the user."""

MEBIBYTE = 1 << 20

log = logging.getLogger(__name__)


class NodeRun:
    """One run of a node; what it has told so far."""

    def __init__(self, doing: str, steps: int) -> None:
        self.planned: PlanEvent | None = None
        self.ran: list[CostEvent] = []
        self.warnings: list[str] = []
        self.started = time.monotonic()
        self.steps = steps
        self.starting = 0.0
        """Seconds in which workers were started."""
        self._doing = doing
        self._done = 0
        self._times: list[float] = []

    def advance(self, count: int = 1) -> None:
        """Say that so many more steps, or pictures, are done."""
        self._done += count
        self.step(self._done)

    def step(self, done: int) -> None:
        """Say that so many steps are done."""
        self._times.append(time.monotonic())
        parts = [f"{self._doing} {done} of {self.steps}"]
        if self.pace:
            parts.append(f"{self.pace:.2f} s a step")
            parts += left_in_words(self.pace * (self.steps - done))
        say(" · ".join(parts))

    @property
    def reached(self) -> str:
        """How far it got, in words; nothing if it has not begun."""
        return f" after {len(self._times)} of {self.steps}" if self._times else ""

    @property
    def pace(self) -> float:
        """Seconds a step once it was going; 0 while that is not known."""
        return (self._times[-1] - self._times[0]) / (len(self._times) - 1) if len(self._times) > 1 else 0.0


class NodeProgress:
    """Hears what the Backend reports and says it on the node that is executed."""

    def __init__(self) -> None:
        self._run: NodeRun | None = None
        self._displayed_start = (0, 0)
        self._alone: dict[object, float] = {}
        """Measured seconds a step on one device, by the job."""

    def hear(self, event: Event) -> None:
        """Listen to the Backend."""
        match event:
            case StartingEvent(workers=workers, seconds=seconds):
                if self._run is not None:
                    self._run.starting = seconds
                self._starting(workers, int(seconds))
            case MeasuringEvent(what=what):
                say(f"Measuring {what}")
            case PlanEvent() if self._run is not None:
                self._run.planned = event
            case CostEvent() if self._run is not None:
                self._run.ran.append(event)

    def _starting(self, workers: int, seconds: int) -> None:
        if (workers, seconds) != self._displayed_start:  # it is told more often than its text changes
            self._displayed_start = workers, seconds
            say(f"Starting {workers} worker{'s' if workers > 1 else ''}, {seconds} s")

    def advance(self, count: int) -> None:
        """So many more pictures of the run are done."""
        if self._run is not None:
            self._run.advance(count)

    @contextlib.contextmanager
    def run(self, doing: str, steps: int = 0, first: str = "") -> Iterator[NodeRun]:
        """A run of the node that is executed, which is said at once; what it came to is said when it has ended well."""
        self._run = run = NodeRun(doing, steps)
        say(first or doing)
        try:
            yield run
        except BaseException as error:
            why = f": {error}" if isinstance(error, OURS) else ""
            say(f"{'Cancelled' if isinstance(error, InterruptProcessingException) else 'Failed'}{run.reached}{why}")
            raise
        finally:
            self._run = None
        if run.ran:
            self._publish(run)

    def _publish(self, run: NodeRun) -> None:
        plan, alone = run.ran[-1].plan, None
        if run.planned is not None and run.pace:
            question = run.planned.question
            job = question.spec, replace(question.job, steps=0), question.workload, question.compiler, plan.devices[0]
            if plan.world_size == 1:
                self._alone[job] = run.pace
            alone = self._alone.get(job)
        seconds = time.monotonic() - run.started - run.starting
        times = RunTimes(seconds, run.starting, run.steps, run.pace)
        publish(outcome(run.ran, run.planned, times, alone, run.warnings))


def left_in_words(seconds: float) -> list[str]:
    """How much longer it takes, in minutes where these are some; nothing at the end."""
    if not seconds:
        return []
    return [f"{seconds / 60:.0f} min left" if seconds >= 90 else f"{math.ceil(seconds)} s left"]


def loading() -> Callable[[int, int], None]:
    """Return a function that shows on the node how much of a model's weights is loaded."""
    began: list[float] = []
    texts: list[str] = []

    def show(done: int, total: int) -> None:
        if not began:
            began.append(time.monotonic())
        text = f"Loading {part_of(done, total)}"
        if text not in texts[-1:]:  # it is told more often than its text changes
            texts.append(text)
            say(text)
        if done == total:
            seconds = time.monotonic() - began[0]
            log.info("Parallel: the workers loaded %d MiB in %.1f s", total // MEBIBYTE, seconds)

    return show


def executing() -> tuple[str, str] | None:
    """The prompt that is executed and, of its nodes, the one that the user sees; None outside of any.

    A node may have others work in its place, each with an id of its own, as a loop's turns are.
    """
    context = get_executing_context()
    if context is None:
        return None
    return context.prompt_id, get_progress_state().dynprompt.get_display_node_id(context.node_id)


def say(text: str) -> None:
    """Show a text on the node that is executed, to the page that queued it."""
    execution = executing()
    if execution is not None and (page := PromptServer.instance.client_id) is not None:
        PromptServer.instance.send_progress_text(text, execution[1], page)


def publish(result: Outcome) -> None:
    """Show on the node what its run came to, tell the page, and put it into ComfyUI's history."""
    say(in_words(result))
    execution = executing()
    if execution is None:
        return
    prompt, node = execution
    server, record = PromptServer.instance, msgspec.to_builtins(result)
    if server.client_id is not None:
        message = {"prompt_id": prompt, "node": node, "outcome": record}
        server.send_sync(EVENT, message, server.client_id)
    _keep(server.prompt_queue, prompt, node, record)


def _keep(queue: Any, prompt: str, node: str, record: dict[str, Any]) -> None:
    """The history has an entry only once the prompt is done; what it will be made of is with the queue until then."""
    running, _ = queue.get_current_queue_volatile()
    for _, prompt_id, _, extra_data, *_ in running:
        if prompt_id == prompt:
            extra_data[HISTORY] = {**extra_data.get(HISTORY, {}), node: record}
