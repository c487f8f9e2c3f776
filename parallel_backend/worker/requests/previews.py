"""Transfer of a step's results to the host while the rank computes the next step."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Mapping
from types import TracebackType

import torch
from torch import Tensor

from ...errors import Cancelled
from ...transfers import empty_pinned
from ...wire.message import Message

Send = Callable[[Message, Mapping[str, Tensor]], None]

MOST_WAITING = 4
"""Largest number of previews that wait for a host that does not read. Then the denoise loop waits too."""


class Previews:
    """A context whose thread sends messages with tensors, in the order of `show`. The exit waits until all are sent.

    On a GPU, a separate CUDA stream copies the tensors to pinned memory. So neither the host nor the GPU's other work waits for
    the copy.
    """

    def __init__(self, device: torch.device, send: Send) -> None:
        self._device = device
        self._send = send
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(MOST_WAITING)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="previews", daemon=True)

    def __enter__(self) -> Previews:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None or isinstance(error, Cancelled):
            self._waiting.put(None)
            self._thread.join()
            self._check()
            return
        self._failure = error  # drop the rest without waiting: a failed GPU may never finish a copy
        with contextlib.suppress(queue.Empty):
            while True:
                self._waiting.get_nowait()
        self._waiting.put(None)

    def show(self, message: Message, tensors: Mapping[str, Tensor]) -> None:
        """Queue a message and its tensors for sending. Nobody may write to the tensors. Raise the error of an earlier send."""
        self._check()
        copies, wait = self._copied(tensors)

        def send() -> None:
            wait()
            self._send(message, copies)

        self._waiting.put(send)

    def _copied(self, tensors: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], Callable[[], None]]:
        """Start to copy tensors to the host. Return the copies, and a function that waits until they are complete."""
        if self._stream is None:
            return tensors, lambda: None
        copies: dict[str, Tensor] = {}
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for name, tensor in tensors.items():
                copies[name] = empty_pinned(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)
                tensor.record_stream(self._stream)
            done = torch.cuda.Event(blocking=True)
            done.record(self._stream)
        return copies, done.synchronize

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a new thread would open a context on GPU 0
        while (send := self._waiting.get()) is not None:
            if self._failure is None:  # after a failure, only empty the queue
                try:
                    send()
                except Exception as error:
                    self._failure = error
