"""What the host and its fork server tell each other over their socket pair: msgpack, one message a packet.

Start, which may be larger than a packet, goes in memory of the kernel's whose descriptor travels.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec

MAX_PACKET_BYTES = 1 << 10


class Start(msgspec.Struct, frozen=True, tag=True):
    """Fork one worker for each of `variables`, its environment being `environment` with these on top.

    Names and values are bytes, which need not be UTF-8. Beside it travels the read end of the group's death pipe. What
    rank N prints goes to `log_path(directory, N)`. `imports` are modules to import first, once for all.
    """

    group: int
    directory: str
    environment: dict[bytes, bytes]
    variables: list[dict[bytes, bytes]]
    imports: list[str]


class Started(msgspec.Struct, frozen=True, tag=True):
    """A worker was forked; a pidfd of it travels beside this."""

    group: int
    rank: int
    pid: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A worker has ended; `code` is as subprocess gives it."""

    group: int
    rank: int
    code: int


def send_start(connection: socket.socket, start: Start, death_pipe: int) -> None:
    """Send it to the fork server. Raises OSError."""
    memory = os.memfd_create("start", os.MFD_CLOEXEC)
    try:
        with open(memory, "wb", closefd=False) as file:
            file.write(msgspec.msgpack.encode(start))
        socket.send_fds(connection, [b"start"], [death_pipe, memory])
    finally:
        os.close(memory)


def receive_start(connection: socket.socket) -> tuple[Start, int] | None:
    """The host's next Start and the death pipe; None once the host is gone."""
    try:
        data, descriptors, _, _ = socket.recv_fds(connection, MAX_PACKET_BYTES, 2)
    except OSError:
        return None
    if not data:
        return None
    death_pipe, memory = descriptors
    with open(memory, "rb") as file:
        file.seek(0)
        return msgspec.msgpack.decode(file.read(), type=Start), death_pipe


def log_path(directory: Path, rank: int) -> Path:
    """What a worker prints."""
    return directory / f"rank{rank}.log"
