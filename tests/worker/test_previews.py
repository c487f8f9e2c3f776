"""Previews of steps are sent by a thread, in order, and no preview is lost or left behind."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from parallel_backend.errors import Cancelled
from parallel_backend.wire.message import Message
from parallel_backend.wire.to_host import SampleStepReply
from parallel_backend.worker.requests.previews import MOST_WAITING, Previews

CPU = torch.device("cpu")


class Host:
    """A host that takes messages while `reads` is set."""

    def __init__(self) -> None:
        self.got: list[tuple[int, float]] = []
        self.reads = threading.Event()
        self.reads.set()

    def take(self, message: Message, tensors: Mapping[str, Tensor]) -> None:
        assert self.reads.wait(30)
        assert isinstance(message, SampleStepReply)
        self.got.append((message.step, float(tensors["x"])))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU"))])  # fmt: skip
def test_the_loop_continues_while_the_host_does_not_read_and_previews_arrive_in_order(device: str) -> None:
    host = Host()
    host.reads.clear()
    with Previews(torch.device(device), host.take) as previews:
        for step in range(MOST_WAITING):
            previews.show(SampleStepReply(1, step), {"x": torch.tensor(float(step), device=device)})
        assert host.got == []
        host.reads.set()
    assert host.got == [(step, float(step)) for step in range(MOST_WAITING)]


def shown_then(host: Host, error: BaseException) -> None:
    """Run a loop that shows one step and ends with an error."""
    with Previews(CPU, host.take) as previews:
        previews.show(SampleStepReply(1, 0), {"x": torch.zeros(())})
        raise error


def test_a_cancelled_run_sends_all_previews_before_it_ends() -> None:
    host = Host()
    with pytest.raises(Cancelled):
        shown_then(host, Cancelled())
    assert host.got == [(0, 0.0)]


def test_a_send_that_fails_is_raised_in_the_loop() -> None:
    def take(*_: object) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError), Previews(CPU, take) as previews:
        previews.show(SampleStepReply(1, 0), {"x": torch.zeros(())})


def test_a_failure_of_the_run_does_not_wait_for_previews() -> None:
    host = Host()
    host.reads.clear()
    with pytest.raises(RuntimeError, match="the GPU is gone"):
        shown_then(host, RuntimeError("the GPU is gone"))
    assert host.got == []
    host.reads.set()


def test_the_thread_sends_from_the_device_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    set_by: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: set_by.append((threading.current_thread().name, device))
    )
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    with Previews(torch.device("cuda", 1), lambda *_: None):
        pass
    assert set_by == [("previews", torch.device("cuda", 1))]
