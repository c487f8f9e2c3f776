"""A rank's connection to the host: incoming messages, the heartbeat, and the end of the worker when the connection closes."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable, Mapping
from typing import NoReturn

from torch import Tensor

from ...wire.frames import BadFrame, Frame, FrameCutter, encode, share, worker_decoder
from ...wire.message import Message
from ...wire.to_host import ConnectReply, DeclinedReply, HeartbeatReply
from ...wire.to_worker import AbandonRequest, CancelRequest, RecoverRequest
from .status import RankProgress

HEARTBEAT_SECONDS = 1.0

GIVE_UP_SECONDS = 60.0
"""Seconds within which a request must end after its client has left, and a client must send RecoverRequest after a failure."""


class HostConnection:
    """The connection to the host, which queues the host's messages. The worker ends with the connection.

    A CancelRequest does not wait in the queue: `cancelled` returns True from then on. A request that cannot be decoded is
    declined. For any other frame that cannot be decoded, `next` raises the error.

    Args:
        connection: a socket to the host, or to the gateway.
        rank: this worker's rank, which all frames name.
        hello: the first message to send.
        status: the rank's progress, which the heartbeat reports.
        leave: ends the process.
    """

    def __init__(
        self,
        connection: socket.socket,
        rank: int,
        hello: ConnectReply,
        status: RankProgress,
        leave: Callable[[], NoReturn],
    ) -> None:
        self._socket = connection
        self._rank = rank
        self._status = status
        self._leave = leave
        self._inbox: queue.SimpleQueue[Frame | BadFrame] = queue.SimpleQueue()
        self._cancelled = self._newest = -1
        self._recoveries: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._frame_count = 0
        self._idle = threading.Event()
        self._sending = threading.Lock()
        self.send(hello)
        for target in (self._receive, self._heartbeat):
            threading.Thread(target=target, name=target.__name__, daemon=True).start()

    def send(self, message: Message, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Send a message and its tensors. Block while the host does not read."""
        data = encode(message, tensors, self._rank)
        with self._sending:
            self._socket.sendall(data)

    def next(self) -> Frame:
        """Block until there is a frame to carry out, and return it. The previous frame is done. Raise BadFrame."""
        self._idle.set()
        frame = self._inbox.get()
        self._idle.clear()
        if isinstance(frame, BadFrame):
            raise frame
        self._frame_count += 1
        return frame

    def hand_over(self, message: Message, tensor: Tensor) -> None:
        """Send a message with a tensor in shared memory."""
        data, descriptor = encode(message, rank=self._rank), share(tensor)
        try:
            with self._sending:
                sent = socket.send_fds(self._socket, [data], [descriptor])
                self._socket.sendall(data[sent:])
        finally:
            os.close(descriptor)

    def cancelled(self, request: int) -> bool:
        """Return True if the host has cancelled this request."""
        return self._cancelled == request

    def may_recover(self, request: int) -> bool:
        """Wait for a RecoverRequest of the host for this request. Return False after GIVE_UP_SECONDS without one."""
        try:
            while self._recoveries.get(timeout=GIVE_UP_SECONDS) != request:
                pass
        except queue.Empty:
            return False
        return True

    def _receive(self) -> None:
        cutter, decoder = FrameCutter(), worker_decoder()
        try:
            while data := self._socket.recv(1 << 20):
                frames = cutter.feed(data)
                self._status.receiving = bool(frames) or cutter.partial
                for raw in frames:
                    try:
                        self._take(decoder.decode(raw))
                    except BadFrame as error:
                        self._misread(error)
                self._status.receiving = cutter.partial
        except BadFrame as error:
            self._inbox.put(error)  # the begin of the next frame is unknown
            return
        except OSError:
            pass  # the host is gone, so the worker ends
        self._leave()

    def _take(self, frame: Frame) -> None:
        match frame.message:
            case CancelRequest(request=request):
                self._cancelled = request
            case RecoverRequest(request=request):
                self._recoveries.put(request)
            case AbandonRequest():
                self._cancelled = self._newest
                threading.Thread(target=self._give_up, args=(self._frame_count,), daemon=True).start()
            case message:
                self._newest = getattr(message, "request", self._newest)
                self._inbox.put(frame)

    def _misread(self, error: BadFrame) -> None:
        if error.request is None:
            self._inbox.put(error)
        else:
            self.send(DeclinedReply(error.request, f"the workers cannot read the request: {error}."))

    def _give_up(self, frame_count: int) -> None:
        """End the worker if the request that ran when the client left does not end."""
        if not self._idle.wait(GIVE_UP_SECONDS) and self._frame_count == frame_count:
            self._leave()

    def _heartbeat(self) -> None:
        while True:
            status = self._status
            status.changed.clear()
            status.mark_compiling()
            try:
                self.send(HeartbeatReply(status.doing(), status.step, status.progress, status.waiting()))
            except OSError:
                self._leave()
            status.changed.wait(HEARTBEAT_SECONDS)
