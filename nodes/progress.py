"""Progress on the node: a line while a run works, and the outcome afterwards.

The Backend and the nodes report in the thread that executes the node. This module sends the reports to ComfyUI's server.
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
"""Name of the message to the page, with the node's id, that a run has ended well."""

HISTORY = "parallel"
"""Key in a prompt's extra data, which ComfyUI keeps in its history. The value holds the outcomes by the node's id."""

OURS = Refused, NotFinite, RequestFailed, WorkerFailed
"""Error classes whose text is a sentence for the user."""

MEBIBYTE = 1 << 20

SECONDS_BETWEEN_STEPS = 0.5
"""Least time between two lines about steps. The page draws each line in some 20 ms, and messages that come faster than the page
draws them wait in a queue, in front of the user's Cancel.
"""

log = logging.getLogger(__name__)


class RunEnd(msgspec.Struct, frozen=True):
    """The end of a run without a result.

    Attributes:
        text: the last text on the node without the reason, such as `Cancelled after 3 of 20`; empty while the last run is active
            and after a result.
        at: seconds since 1970.
    """

    text: str = ""
    at: float = 0.0


class NodeRun:
    """One run of a node, with the events that it has reported so far."""

    def __init__(self, doing: str, steps: int) -> None:
        self.planned: PlanEvent | None = None
        self.ran: list[CostEvent] = []
        self.warnings: list[str] = []
        self.started = time.monotonic()
        self.steps = steps
        self.starting = 0.0
        """Seconds spent on starting workers."""
        self._doing = doing
        self._done = 0
        self._times: list[float] = []
        self._reported_at = -math.inf

    def advance(self, count: int = 1) -> None:
        """Report that `count` more steps, or pictures, are done."""
        self._done += count
        self.step(self._done)

    def step(self, done: int) -> None:
        """Report on the node that `done` steps are done in all, unless the last report is too recent."""
        now = time.monotonic()
        self._times.append(now)
        if now - self._reported_at < SECONDS_BETWEEN_STEPS and done < self.steps:
            return
        self._reported_at = now
        parts = [f"{self._doing} {done} of {self.steps}"]
        if self.pace:
            parts.append(f"{self.pace:.2f} s a step")
            parts += left_in_words(self.pace * (self.steps - done))
        say(" · ".join(parts))

    @property
    def reached(self) -> str:
        """Return the progress so far, in words; empty if no step is done."""
        return f" after {len(self._times)} of {self.steps}" if self._times else ""

    @property
    def pace(self) -> float:
        """Return the seconds per step, without the first step; 0 while fewer than two steps are done."""
        return (self._times[-1] - self._times[0]) / (len(self._times) - 1) if len(self._times) > 1 else 0.0


class NodeProgress:
    """A listener to the Backend's events that shows them on the running node."""

    def __init__(self) -> None:
        self.last_end = RunEnd()
        self._run: NodeRun | None = None
        self._displayed_start = (0, 0)
        self._alone: dict[object, tuple[float, float]] = {}
        """Seconds per step of the last run on one device, and its end in seconds since 1970, by the job."""

    def hear(self, event: Event) -> None:
        """Handle an event of the Backend."""
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
        if (workers, seconds) != self._displayed_start:  # the event comes more often than its text changes
            self._displayed_start = workers, seconds
            say(f"Starting {workers} worker{'s' if workers > 1 else ''}, {seconds} s")

    def advance(self, count: int) -> None:
        """Report that `count` more pictures of the run are done."""
        if self._run is not None:
            self._run.advance(count)

    @contextlib.contextmanager
    def run(self, doing: str, steps: int = 0, first: str = "") -> Iterator[NodeRun]:
        """Announce a run of the executed node, and provide its NodeRun. Show the outcome when the run has ended well."""
        self._run = run = NodeRun(doing, steps)
        self.last_end = RunEnd()
        say(first or doing)
        try:
            yield run
        except BaseException as error:
            why = f": {error}" if isinstance(error, OURS) else ""
            said = f"{'Cancelled' if isinstance(error, InterruptProcessingException) else 'Failed'}{run.reached}"
            self.last_end = RunEnd(said, time.time())
            say(said + why)
            raise
        finally:
            self._run = None
        if run.ran:
            self._publish(run)

    def _publish(self, run: NodeRun) -> None:
        plan, alone = run.ran[-1].plan, (0.0, 0.0)
        if run.planned is not None and run.pace:
            question = run.planned.question
            job = question.spec, replace(question.job, steps=0), question.workload, question.compiler, plan.devices[0]
            if plan.world_size == 1:
                self._alone[job] = run.pace, time.time()
            alone = self._alone.get(job, alone)
        seconds = time.monotonic() - run.started - run.starting
        times = RunTimes(seconds, run.starting, run.steps, run.pace, *alone)
        publish(outcome(run.ran, run.planned, times, run.warnings))


def left_in_words(seconds: float) -> list[str]:
    """Return the remaining time in words, in minutes from 90 s on; empty at the end."""
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
        if text not in texts[-1:]:  # the event comes more often than its text changes
            texts.append(text)
            say(text)
        if done == total:
            seconds = time.monotonic() - began[0]
            log.info("Parallel: the workers loaded %d MiB in %.1f s", total // MEBIBYTE, seconds)

    return show


def executing() -> tuple[str, str] | None:
    """Return the ids of the running prompt and of the node that the user sees; None outside of a prompt.

    A node may expand into other nodes with ids of their own, as a loop does for its iterations.
    """
    context = get_executing_context()
    if context is None:
        return None
    return context.prompt_id, get_progress_state().dynprompt.get_display_node_id(context.node_id)


def workflow() -> str:
    """Return the id of the page's workflow that the running prompt was queued from; empty if the prompt has none."""
    execution = executing()
    extra_data = _extra_data(PromptServer.instance.prompt_queue, execution[0]) if execution else {}
    match extra_data:
        case {"extra_pnginfo": {"workflow": {"id": str(found)}}}:
            return found
        case _:
            return ""


def say(text: str) -> None:
    """Show a text on the running node, in the page that queued the prompt."""
    execution = executing()
    if execution is not None and (page := PromptServer.instance.client_id) is not None:
        PromptServer.instance.send_progress_text(text, execution[1], page)


def publish(result: Outcome) -> None:
    """Show a run's outcome on its node, send it to the page, and put it into ComfyUI's history."""
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
    """Store an outcome in the running prompt's extra data. ComfyUI makes the history entry from these data at the end."""
    extra_data = _extra_data(queue, prompt)
    extra_data[HISTORY] = {**extra_data.get(HISTORY, {}), node: record}


def _extra_data(queue: Any, prompt: str) -> dict[str, Any]:
    """Return the extra data of a running prompt, or an empty dict if the prompt does not run."""
    running, _ = queue.get_current_queue_volatile()
    return next((extra_data for _, prompt_id, _, extra_data, *_ in running if prompt_id == prompt), {})
