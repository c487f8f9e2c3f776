"""What a rank is doing, written by its main thread and reported to the host by its connection."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

COMMUNICATION = ("torch.distributed.", f"{__package__.rsplit('.', 2)[0]}.comm.")
"""The modules in which a rank waits for others."""

IDLE = "idle"

CONNECTING = "connecting the workers"
"""The phase in which communicators are opened and used once."""

COMPILER = "torch._dynamo.convert_frame"
"""The module that torch.compile compiles from; what has been compiled runs without it."""

READING = "reading a request"
"""The phase of an idle rank while its next request comes."""

LONGEST_COMPILE = 1800.0
"""Seconds for which compiling one thing counts as getting on."""


@dataclass
class RankProgress:
    """`progress` grows as long as the rank gets anywhere: a block computed, bytes loaded. `changed` is set by `enter`.

    `entered` has the phases and steps since the request began, and when (time.perf_counter). `faults` is called when a
    phase or step begins; None outside of tests. `receiving` is whether a part of a frame has come from the host,
    `occupied` whether the main thread has begun with one that has no phase yet. The connection and the main thread set one each.
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
        """Return the phase for those who look on; a request is read before it has a phase of its own."""
        return READING if self.phase == IDLE and (self.receiving or self.occupied) else self.phase

    def occupy(self) -> None:
        """Note that the main thread has begun with a request, or its relay to the other ranks."""
        self.occupied = True

    def on_progress(self) -> None:
        """Note that something got done."""
        self.progress += 1

    def mark_compiling(self) -> None:
        """Note that the main thread compiles, if it does: a block may take minutes. The connection asks before each heartbeat."""
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
        """Whether the main thread is in a collective, the rendezvous included, by the function it is in."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        return frame is not None and frame.f_globals.get("__name__", "").startswith(COMMUNICATION)
