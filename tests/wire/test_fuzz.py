"""Thousands of mutated frames: each is refused or is a frame, and none takes more memory than its bytes."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
import tracemalloc
from pathlib import Path

import pytest
import torch

from parallel_backend.host.workers.channel import LocalChannel
from parallel_backend.wire.frames import MAGIC, PREFIX, BadFrame, FrameDecoder, encode, host_decoder, worker_decoder
from parallel_backend.wire.message import PROTOCOL
from parallel_backend.wire.to_host import (
    ConnectReply,
    DoneReply,
    FailedReply,
    HeartbeatReply,
    RankFacts,
    SampleStepReply,
)
from parallel_backend.wire.to_worker import CancelRequest
from tests.wire.messages import SAMPLE, TENSORS, mutated

QUICK_CASES, ALL_CASES = 2_000, 6_000
"""Numbers of frames in each direction, in the quick run and with --all."""

GENERATION = 1
FACTS = RankFacts("host", "cpu", "2", "0.42", "abc")
CASES_OF = {
    "to workers": (
        worker_decoder,
        [encode(SAMPLE, TENSORS), encode(CancelRequest(3)), encode(SAMPLE, {"x": torch.zeros(9)})],
    ),
    "to the host": (
        host_decoder,
        [
            encode(ConnectReply(GENERATION, FACTS), rank=3),
            encode(HeartbeatReply("sampling", 3, 17, False)),
            encode(SampleStepReply(1, 2), {"denoised": torch.zeros(2, 3), "x": torch.zeros(2, 3)}),
            encode(FailedReply(1, "cpu", "loading", 0, None, "reason", "trace" * 20, 1.5)),
            encode(DoneReply(1), {"result": torch.zeros(1, 16, 4, 4)}),
        ],
    ),
}


def framed(frame: bytes, draw: random.Random) -> bytes:
    """Return a frame with a mutated header and a fitting prefix, so that only the schema can refuse it."""
    *start, length, size = PREFIX.unpack_from(frame)
    header = mutated(frame[PREFIX.size : PREFIX.size + length], draw)
    return PREFIX.pack(*start, len(header), size) + header + frame[PREFIX.size + length :]


@pytest.mark.parametrize("direction", CASES_OF)
def test_mutated_frames_are_refused_or_are_frames(direction: str, request: pytest.FixtureRequest) -> None:
    cases = ALL_CASES if request.config.getoption("--all") else QUICK_CASES
    make, frames = CASES_OF[direction]
    draw = random.Random(direction)
    refused = 0
    tracemalloc.start()
    try:
        for case in range(cases):
            frame = draw.choice(frames)
            data = (mutated if case % 2 else framed)(frame, draw)
            refused += not survives(make(), data, draw)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert refused > cases // 3  # others wait for more bytes, or are frames with another number
    assert peak < 16 << 20


def survives(decoder: FrameDecoder, data: bytes, draw: random.Random) -> bool:
    """Return True if the decoder accepts the bytes, in pieces as from a socket. Only BadFrame may be raised."""
    try:
        for start in range(0, len(data), piece := draw.choice((7, 64, 1 << 20))):
            decoder.feed(data[start : start + piece])
    except BadFrame:
        return False
    return True


def test_deeply_nested_and_endless_headers_are_refused() -> None:
    for header in (b"\x91" * 500_000, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff" * 9, b"\x81" * 1000):
        with pytest.raises(BadFrame):
            worker_decoder().feed(PREFIX.pack(MAGIC, PROTOCOL, 0, len(header), 0) + header)


def test_mutated_frames_of_a_worker_end_only_its_connection(tmp_path: Path) -> None:
    """A live channel of the host receives the frames, and its one thread must survive them all."""
    draw = random.Random(3)
    _, frames = CASES_OF["to the host"]
    hello = encode(ConnectReply(GENERATION, FACTS), rank=0)
    channel = LocalChannel(tmp_path / "socket", GENERATION, patience=10)
    files = len(os.listdir("/proc/self/fd"))
    try:
        for case in range(1000):
            with worker(tmp_path / "socket") as stranger, contextlib.suppress(OSError):
                stranger.sendall((hello if case % 2 else b"") + mutated(draw.choice(frames), draw))
        with worker(tmp_path / "socket") as right:
            right.sendall(
                encode(ConnectReply(GENERATION, FACTS), rank=7)
                + encode(HeartbeatReply("sampling", 3, 17, False), rank=7)
            )
            until = time.monotonic() + 20
            while 7 not in channel.heard:
                assert time.monotonic() < until
                time.sleep(0.01)
        while len(os.listdir("/proc/self/fd")) > files + 2:
            assert time.monotonic() < until
            time.sleep(0.01)
    finally:
        channel.close()


def worker(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(str(path))  # waits while the host is slow to accept
    connection.settimeout(20)
    return connection
