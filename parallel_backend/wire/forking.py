"""What the host and its fork server tell each other over their socket pair: msgpack, one message a packet."""

from __future__ import annotations

from pathlib import Path

import msgspec

MAX_PACKET_BYTES = 1 << 20


class Start(msgspec.Struct, frozen=True, tag=True):
    """Fork one worker for each of `variables`, its environment being `environment` with these on top.

    Beside it travels the read end of the group's death pipe. What rank N prints goes to `log_path(directory, N)`.
    """

    group: int
    directory: str
    environment: dict[str, str]
    variables: list[dict[str, str]]


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


def log_path(directory: Path, rank: int) -> Path:
    """What a worker prints."""
    return directory / f"rank{rank}.log"
