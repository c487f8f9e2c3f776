"""Messages between the host and its fork server over their socket pair: msgpack, one message per packet.

A Start may be larger than a packet. Shared memory (memfd) carries it, and the packet carries the descriptor.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec

MAX_PACKET_BYTES = 1 << 10


class Start(msgspec.Struct, frozen=True, tag=True):
    """An order to fork one worker for each entry of `variables`.

    The packet also carries the read end of the group's death pipe. Rank N writes its output to `log_path(directory, N)`.

    Attributes:
        environment: environment of every worker. Names and values are bytes, which need not be UTF-8.
        variables: for each rank, the variables that are added to `environment`.
        imports: modules that the fork server imports first, once for all workers.
    """

    group: int
    directory: str
    environment: dict[bytes, bytes]
    variables: list[dict[bytes, bytes]]
    imports: list[str]


class Started(msgspec.Struct, frozen=True, tag=True):
    """A notice that a worker was forked. The packet also carries a pidfd of the worker."""

    group: int
    rank: int
    pid: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A notice that a worker has ended. `code` is its exit code, as in `subprocess`."""

    group: int
    rank: int
    code: int


def send_start(connection: socket.socket, start: Start, death_pipe: int) -> None:
    """Send a Start to the fork server. Raises OSError."""
    memory = os.memfd_create("start", os.MFD_CLOEXEC)
    try:
        with open(memory, "wb", closefd=False) as file:
            file.write(msgspec.msgpack.encode(start))
        socket.send_fds(connection, [b"start"], [death_pipe, memory])
    finally:
        os.close(memory)


def receive_start(connection: socket.socket) -> tuple[Start, int] | None:
    """Return the host's next Start and the death pipe, or None once the host is gone."""
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
    """Return the path of the file with a worker's output."""
    return directory / f"rank{rank}.log"
