"""The host's end of the workers' connections: a Unix socket in a private directory and one reading thread."""

from __future__ import annotations

import os
import queue
import selectors
import socket
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ...clock import AwakeClock
from ...wire.frames import DTYPES, BadFrame, Frame, FrameDecoder, encode, host_decoder, mapped
from ...wire.message import Message
from ...wire.to_host import ConnectReply, DecodedPixelsReply, HeartbeatReply

POLL_SECONDS = 0.1
"""Seconds between two checks, by the reading thread if the channel closes, and by a sender if it has waited too long."""

MOST_DESCRIPTORS = 16
"""Largest number of descriptors that are received at a time. A rank sends them one by one."""


@dataclass(frozen=True)
class Received:
    """A message from a rank."""

    rank: int
    frame: Frame


@dataclass(frozen=True)
class Disconnected:
    """The end of a rank's connection. `reason` is empty if the connection was closed in an orderly way."""

    rank: int
    reason: str


@dataclass
class Heard:
    """A rank's latest heartbeat, its time of arrival, and the time of the last progress (seconds of the channel's clock)."""

    heartbeat: HeartbeatReply
    at: float
    moved: float


GATEWAY = -1
"""Number in the place of a rank, for the one connection to all ranks on other machines."""


class Channel:
    """The workers' messages, queued in the order of arrival. Heartbeats are not queued.

    Attributes:
        generation: the group's generation.
        heard: the latest heartbeat of each rank.
        lost: the ranks whose connection has ended, in that order, with the reason. The reason is empty if the connection was
            closed in an orderly way.
        broken: the error that keeps further ranks from connecting, or None.
        clock: the clock of all times and deadlines of the group.
    """

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.events: queue.Queue[Received | Disconnected] = queue.Queue()
        self.heard: dict[int, Heard] = {}
        self.lost: dict[int, str] = {}
        self.broken: OSError | None = None
        self.clock = AwakeClock()

    def send(self, rank: int, message: Message, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Send a message to a rank.

        Raises:
            OSError: the connection is gone. A Disconnected event has the reason.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Close every connection and end the reading thread."""
        raise NotImplementedError

    def give_up(self) -> None:
        """Make the group end, because it has failed and this process cannot kill it."""

    def take(self, rank: int, frame: Frame) -> None:
        """Record a frame from a rank."""
        if isinstance(frame.message, HeartbeatReply):
            now, last = self.clock.now(), self.heard.get(rank)
            moved = last.moved if last and last.heartbeat == frame.message else now
            self.heard[rank] = Heard(frame.message, now, moved)
        else:
            self.events.put(Received(rank, frame))

    def lose(self, rank: int, reason: str) -> None:
        """Record that a rank's connection has ended."""
        if rank not in self.lost:
            self.lost[rank] = reason
            self.events.put(Disconnected(rank, reason))


class LocalChannel(Channel):
    """A channel to workers on this machine: a Unix socket that accepts one connection for each rank.

    Sending waits at most `patience` seconds for a worker that does not read because it is stopped, and then raises
    TimeoutError.
    """

    def __init__(self, path: Path, generation: int, patience: float) -> None:
        super().__init__(generation)
        self._patience = patience
        self._connections: dict[int, socket.socket] = {}
        self._closing = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(str(path))
            path.chmod(0o600)  # its directory is the user's alone already
            self._listener.listen()
            self._selector = selectors.DefaultSelector()  # in this thread: the caller handles EMFILE
        except OSError:
            self._listener.close()
            raise
        self._thread = threading.Thread(target=self._read, name="parallel-channel", daemon=True)
        self._thread.start()

    def send(self, rank: int, message: Message, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Send a message with its tensors to a rank. Raises OSError if the connection is gone."""
        connection, data = self._connections[rank], memoryview(encode(message, tensors))
        until = self.clock.now() + self._patience
        while data:
            try:
                data = data[connection.send(data) :]
                until = self.clock.now() + self._patience
            except TimeoutError:
                if self.clock.now() > until:
                    raise

    def close(self) -> None:
        """Stop reading and wait until the reading thread has ended."""
        self._closing.set()
        self._thread.join()

    def _read(self) -> None:
        with self._selector as selector, self._listener:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._closing.is_set():
                for key, _ in selector.select(timeout=POLL_SECONDS):
                    if key.fileobj is self._listener:
                        self._admit(selector)
                    elif not self._receive(key.data):
                        selector.unregister(key.fileobj)
            for key in list(selector.get_map().values()):
                if isinstance(key.data, _WorkerConnection):
                    key.data.close()

    def _admit(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # there is no file number left
            self.broken = error
            selector.unregister(self._listener)
            self._listener.close()  # workers find that they cannot connect, and leave
            return
        connection.settimeout(POLL_SECONDS)
        selector.register(connection, selectors.EVENT_READ, _WorkerConnection(connection))

    def _receive(self, peer: _WorkerConnection) -> bool:
        """Read the data of a peer. Return False if its connection has ended."""
        reason = ""
        try:
            data, descriptors, _, _ = socket.recv_fds(peer.connection, 1 << 20, MOST_DESCRIPTORS)
            peer.descriptors.extend(descriptors)
            if data:
                for frame in peer.decoder.feed(data):
                    self._accept(peer, frame)
                return True
        except (OSError, BadFrame) as error:
            reason = str(error)
        peer.close()
        if peer.rank is not None:
            self.lose(peer.rank, reason)
        return False

    def _accept(self, peer: _WorkerConnection, frame: Frame) -> None:
        message = frame.message
        if peer.rank is None:
            if not isinstance(message, ConnectReply) or message.generation != self.generation:
                raise BadFrame("not a worker of this generation")
            peer.rank = frame.rank
            self._connections[frame.rank] = peer.connection
        self.take(peer.rank, peer.with_shared(frame))


class _WorkerConnection:
    """A connection, its decoder, and its rank, which is known once the ConnectReply has arrived."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.decoder: FrameDecoder = host_decoder()
        self.rank: int | None = None
        self.descriptors: deque[int] = deque()

    def with_shared(self, frame: Frame) -> Frame:
        """Return the frame with its tensor in shared memory, if the frame has one. Raises BadFrame if that memory is unusable."""
        message = frame.message
        if not isinstance(message, DecodedPixelsReply):
            return frame
        if not self.descriptors or message.dtype not in DTYPES:
            raise BadFrame("pixels without shared memory")
        try:
            return Frame(message, {"pixels": mapped(self.descriptors.popleft(), DTYPES[message.dtype], message.shape)})
        except ValueError as error:
            raise BadFrame(str(error)) from None

    def close(self) -> None:
        """Close the connection and the descriptors that came over it."""
        self.connection.close()
        while self.descriptors:
            os.close(self.descriptors.popleft())
