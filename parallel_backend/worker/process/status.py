"""The state of a rank, which its main thread writes and its connection reports to the host."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

COMMUNICATION = ("torch.distributed.", f"{__package__.rsplit('.', 2)[0]}.comm.")
"""The modules in which a rank waits for other ranks."""

IDLE = "idle"

CONNECTING = "connecting the workers"
"""The phase in which communicators are opened and used for the first time."""

COMPILER = "torch._dynamo.convert_frame"
"""The module from which torch.compile compiles. Compiled code runs without it."""

READING = "reading a request"
"""The phase of an idle rank while its next request arrives."""

LONGEST_COMPILE = 1800.0
"""Seconds for which one compilation counts as progress."""


@dataclass
class RankProgress:
    """The phase, step and progress of a rank.

    Attributes:
        phase: the phase of the request.
        step: the step of the phase.
        progress: a counter that grows while the rank makes progress: a block computed, bytes loaded.
        changed: an event that `enter` sets.
        entered: the phases and steps since the request began, with their times (time.perf_counter).
        faults: called when a phase or step begins; None outside of tests.
        receiving: True if a part of a frame has arrived from the host. The connection sets it.
        occupied: True if the main thread has begun with a request that has no phase yet. The main thread sets it.
    """

    phase: str = "starting"
    step: int = 0
    progress: int = 0
    changed: threading.Event = field(default_factory=threading.Event)
    entered: list[tuple[str, int, float]] = field(default_factory=list)
    faults: Callable[[str, int], None] | None = None
    receiving: bool = False
    occupied: bool = False
    _compiling_since: float | None = None

    def enter(self, phase: str, step: int = 0) -> None:
        """Begin a phase, or a step of it."""
        self.phase, self.step, self.occupied = phase, step, False
        self.entered.append((phase, step, time.perf_counter()))
        self.on_progress()
        self.changed.set()
        if self.faults is not None:
            self.faults(phase, step)

    def doing(self) -> str:
        """Return the phase to report. An idle rank that receives a request reports that it reads one."""
        return READING if self.phase == IDLE and (self.receiving or self.occupied) else self.phase

    def occupy(self) -> None:
        """Record that the main thread has begun with a request, or with its relay to the other ranks."""
        self.occupied = True

    def on_progress(self) -> None:
        """Record progress."""
        self.progress += 1

    def mark_compiling(self) -> None:
        """Record progress if the main thread compiles, as a block may take minutes. Called before each heartbeat."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None and frame.f_globals.get("__name__") != COMPILER:
            frame = frame.f_back
        if frame is None:
            self._compiling_since = None
            return
        now = time.monotonic()
        if self._compiling_since is None:
            self._compiling_since = now
        if now - self._compiling_since < LONGEST_COMPILE:
            self.on_progress()

    def waiting(self) -> bool:
        """Return True if the main thread is in a collective or in the rendezvous, by the module of its current function."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        return frame is not None and frame.f_globals.get("__name__", "").startswith(COMMUNICATION)
