"""A rank's connection to the host: what arrives, the pulse, and leaving when the host is gone."""

from __future__ import annotations

import os
import queue
import shutil
import socket
import threading
from collections.abc import Mapping
from typing import NoReturn

from torch import Tensor

from ..wire.frames import BadFrame, Frame, encode, worker_decoder
from ..wire.messages import PROTOCOL, Cancel, Hello, Message, Pulse
from .environment import Environment
from .status import Status

PULSE_SECONDS = 1.0


class Link:
    """Sends messages to the host and queues what comes from it; the worker's process ends with the connection.

    Cancel does not wait in the queue: it is noted for `cancelled`.
    """

    def __init__(self, environment: Environment, status: Status) -> None:
        self.inbox: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._environment = environment
        self._status = status
        self._cancelled = -1
        self._sending = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(environment.socket)
        self.send(Hello(PROTOCOL, environment.generation, environment.rank, os.getpid()))
        for target in (self._receive, self._pulse, self._watch_host):
            threading.Thread(target=target, name=target.__name__, daemon=True).start()

    def send(self, message: Message, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Send a message and its tensors; blocks while the host does not read."""
        data = encode(message, tensors)
        with self._sending:
            self._socket.sendall(data)

    def cancelled(self, request: int) -> bool:
        """Whether the host has cancelled this request."""
        return self._cancelled == request

    def _receive(self) -> None:
        decoder = worker_decoder()
        try:
            while data := self._socket.recv(1 << 20):
                for frame in decoder.feed(data):
                    if isinstance(frame.message, Cancel):
                        self._cancelled = frame.message.request
                    else:
                        self.inbox.put(frame)
        except (OSError, BadFrame):
            pass  # the host is gone, or is not ours: either way there is nobody to work for
        self._leave()

    def _pulse(self) -> None:
        while True:
            status = self._status
            status.changed.clear()
            try:
                self.send(Pulse(status.phase, status.step, status.marks))
            except OSError:
                self._leave()
            status.changed.wait(PULSE_SECONDS)

    def _watch_host(self) -> None:
        """Block until the host's end of the pipe closes, which the kernel does however the host ends."""
        os.read(self._environment.death_pipe, 1)
        self._leave()

    def _leave(self) -> NoReturn:
        """End this process, and clean up for a host that no longer can."""
        shutil.rmtree(self._environment.run_directory, ignore_errors=True)
        os._exit(0)
