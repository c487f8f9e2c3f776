"""A rank's heartbeats while its main thread compiles, and while a request arrives."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from parallel_backend.wire.frames import encode, host_decoder
from parallel_backend.wire.to_host import ConnectReply, HeartbeatReply, RankFacts
from parallel_backend.wire.to_worker import JoinRequest
from parallel_backend.worker.process import status as module
from parallel_backend.worker.process.host_connection import HostConnection
from parallel_backend.worker.process.status import RankProgress


def heartbeat(status: RankProgress) -> int:
    """Mark progress as the link's thread does, and return the number of marks."""
    thread = threading.Thread(target=status.mark_compiling)
    thread.start()
    thread.join()
    return status.progress


@pytest.mark.parametrize(("longest", "moved"), [(module.LONGEST_COMPILE, [1, 2]), (0.0, [0, 0])])
def test_a_long_compile_counts_as_progress_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch, longest: float, moved: list[int]
) -> None:
    monkeypatch.setattr(module, "LONGEST_COMPILE", longest)
    status, seen, run = RankProgress(), [], []

    def backend(graph: Any, _: Any) -> Any:
        seen.extend([heartbeat(status), heartbeat(status)])

        def compiled(*args: Tensor) -> Any:
            run.append(heartbeat(status))
            return graph.forward(*args)

        return compiled

    torch._dynamo.reset()
    before = heartbeat(status)
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert (before, seen, run) == (0, moved, moved[1:])
    assert heartbeat(status) == moved[1]


def test_an_idle_rank_reports_reading_while_a_long_request_arrives() -> None:
    """The phase lasts from the first byte until the main thread has taken the request."""
    status = RankProgress(phase=module.IDLE)
    ours, theirs = socket.socketpair()
    theirs.settimeout(20)

    def leave() -> NoReturn:
        while True:
            time.sleep(60)

    with ours, theirs:
        connection = HostConnection(ours, 0, ConnectReply(1, RankFacts("h", "cpu", "", "", "")), status, leave)
        phases = phases_of(theirs, status)
        assert next(phases) == module.IDLE
        frame = encode(JoinRequest(1))
        theirs.sendall(frame[:-1])
        reach(phases, module.READING)
        theirs.sendall(frame[-1:])
        connection.next()
        reach(phases, module.IDLE)
        status.occupy()
        reach(phases, module.READING)
        status.enter("sampling")
        reach(phases, "sampling")
        status.enter(module.IDLE)
        reach(phases, module.IDLE)


def phases_of(connection: socket.socket, status: RankProgress) -> Iterator[str]:
    """Yield the phases in heartbeats, as fast as they can be sent."""
    decoder = host_decoder()
    while True:
        status.changed.set()
        for frame in decoder.feed(connection.recv(1 << 16)):
            if isinstance(frame.message, HeartbeatReply):
                yield frame.message.phase


def reach(phases: Iterator[str], phase: str) -> None:
    """Read phases until the given one comes."""
    end = time.monotonic() + 60
    while next(phases) != phase:
        assert time.monotonic() < end, phase
