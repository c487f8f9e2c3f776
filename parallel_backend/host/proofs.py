"""Starts the child process that proves small models of ComfyUI's classes, and limits its time and memory."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

import msgspec
import psutil
import torch

from ..clock import AwakeClock
from ..comfyui_folder import ARGUMENTS, FOLDER
from ..identity import code_digest
from ..models.comfyui.content.known import TrialVerdict
from ..models.comfyui.proof.prove import TOLERANCE
from ..models.comfyui.proof.request import ANSWER, ProofReply, ProofRequest, off
from .workers.launcher import worker_environment

MEMORY = 2 << 30
"""Bytes that the child and its ranks may use together."""

LOOK = 0.5
"""Seconds between two checks of the child's memory."""

LONGEST_LOOK = 1.0
"""Seconds that a check may take. A longer check means that this process was paused, and counts as this many for the child."""

ALONE = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    ARGUMENTS: json.dumps(["--cpu"]),
}
"""Environment variables of the child: one thread, no GPU, ComfyUI on the CPU."""

COMMAND = "parallel_backend.models.comfyui.proof"


class Watched(msgspec.Struct, frozen=True):
    """A reply, and the peak memory in bytes until it came."""

    answer: ProofReply
    memory: int


class Line(msgspec.Struct, frozen=True):
    """A line of output of a child, or the reason why no line came; the seconds until then, and the peak memory in bytes."""

    text: bytes
    failure: str
    seconds: float
    memory: int


class Child:
    """A process that prints a given number of lines, within limits of time and memory.

    Args:
        folder: ComfyUI's folder.
        command: the module to run, and its arguments.
        lines: the number of lines to expect.
        seconds, memory: the limits; seconds for each line, and bytes.
        descriptors: open files for the child to inherit.
    """

    def __init__(
        self,
        folder: str,
        command: Sequence[str],
        lines: int,
        seconds: float,
        memory: int,
        descriptors: Sequence[int] = (),
    ) -> None:
        self._seconds, self._memory = seconds, memory
        self._remaining = lines
        self._clock = AwakeClock(LONGEST_LOOK)
        self._process = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=worker_environment() | ALONE | {FOLDER: folder},
            pass_fds=descriptors,
            start_new_session=True,
        )

    def lines(self, stopped: Callable[[], bool] = lambda: False) -> Iterator[Line]:
        """Yield each line of output, then end the child. If it fails or exceeds a limit, a last line has the reason.

        Args:
            stopped: polled; when it returns True, the child ends without another line.
        """
        try:
            yield from self._lines(stopped)
        finally:
            self.end()

    def _lines(self, stopped: Callable[[], bool]) -> Iterator[Line]:
        read, begun, most = b"", self._clock.now(), 0
        while self._remaining:
            if stopped():
                return
            most = max(most, self._bytes())
            if failure := self._over(begun, most):
                yield Line(b"", failure, self._clock.now() - begun, most)
                return
            assert self._process.stdout is not None
            if not select.select([self._process.stdout], [], [], LOOK)[0]:
                continue
            more = os.read(self._process.stdout.fileno(), 1 << 16)
            if not more:
                code = self._process.wait()
                yield Line(b"", f"its process ended with code {code}", self._clock.now() - begun, most)
                return
            *lines, read = (read + more).split(b"\n")
            for line in lines:
                yield Line(line, "", self._clock.now() - begun, most)
                self._remaining, begun, most = self._remaining - 1, self._clock.now(), 0

    def _over(self, begun: float, memory: int) -> str:
        if self._clock.now() - begun > self._seconds:
            return f"it took longer than {self._seconds:.0f} s"
        if memory > self._memory:
            return f"it took more than {self._memory / (1 << 30):.0f} GiB of memory"
        return ""

    def _bytes(self) -> int:
        """Return the bytes of the child and its ranks together; shared memory counts once."""
        total = 0
        with contextlib.suppress(psutil.Error):
            child = psutil.Process(self._process.pid)
            for process in (child, *child.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    total += process.memory_full_info().pss
        return total

    def end(self) -> None:
        """End the child and its ranks, unless they have ended."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class Prover(Child):
    """A child process that answers proof requests in order.

    Args:
        folder: ComfyUI's folder.
        requests: the calls to prove.
        seconds, memory: the limits; seconds for each reply, and bytes.
    """

    def __init__(self, folder: str, requests: Sequence[ProofRequest], seconds: float, memory: int = MEMORY) -> None:
        super().__init__(folder, [COMMAND, msgspec.json.encode(requests).decode()], len(requests), seconds, memory)

    def answers(self, stopped: Callable[[], bool] = lambda: False) -> Iterator[Watched]:
        """Yield each reply, then end the child. If it fails or exceeds a limit, a last reply has the reason.

        Args:
            stopped: polled; when it returns True, the child ends without another reply.
        """
        for line in self.lines(stopped):
            answer = ProofReply({}, line.seconds, line.failure) if line.failure else ANSWER.decode(line.text)
            yield Watched(answer, line.memory)


Sources = tuple[tuple[str, str], ...]
"""Files with their digests."""


def key_of(request: ProofRequest, sources: Sources) -> str:
    """Return the cache key of a verdict, which contains everything on which the verdict depends."""
    configuration = sorted((request.configuration or {}).items())
    inputs = sorted((request.inputs or {}).items())
    parts = (
        request.kind,
        request.case,
        request.model,
        configuration,
        inputs,
        sources,
        code_digest(),
        torch.__version__,
    )
    return "\n".join(["model class", *map(str, parts)])


def verdict_of(request: ProofRequest, answer: ProofReply, comfyui: str) -> TrialVerdict:
    """Return the verdict of a reply that has errors, or of a model that workers would refuse.

    The mismatch names the split with the largest error, or the refused feature without the remedy.
    """
    if answer.refused:
        mismatch = f"or none, because {answer.failure.rpartition(': ')[0] or answer.failure}"
    else:
        split, error = answer.worst
        mismatch = (
            "" if error <= TOLERANCE else f"which is {off(error)} under {split}, where {TOLERANCE:.0e} is allowed"
        )
    return TrialVerdict(request.kind, (f"{request.kind} ({request.case})",), comfyui, mismatch)
