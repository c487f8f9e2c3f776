"""The workers survive any message, or say why they end."""

from __future__ import annotations

import dataclasses
import re

import msgspec
import pytest
import torch

from parallel_backend.errors import Refused, WorkerFailed
from parallel_backend.host.workers.channel import Received
from parallel_backend.wire.frames import MAGIC, PREFIX, encode
from parallel_backend.wire.message import PROTOCOL
from parallel_backend.wire.to_host import DeclinedReply
from parallel_backend.wire.to_worker import StoreAdaptersRequest
from tests.faults.bench import PLANS
from tests.support.selection import thorough
from tests.wire.messages import SAMPLE

UNREADABLE = {
    "no message": PREFIX.pack(MAGIC, PROTOCOL, 0, 4, 0) + b"\xff" * 4,
    "no frame": b"GET / HTTP/1.1",
    "adapters of no dtype": encode(StoreAdaptersRequest([]), {"a": torch.zeros(3)}).replace(b"float32", b"float99"),
}


def send(bench, data: bytes):
    """Send bytes to rank 0 of the running workers, and return their group."""
    bench.assert_right(2)
    (group,) = bench.backend._groups.values()
    group._channel._connections[0].sendall(data)
    return group


def test_a_request_that_the_workers_cannot_read_is_refused_before_it_is_sent(bench):
    bench.assert_right(2)
    before = bench.workers()
    job = dataclasses.replace(bench.job, sigmas=bench.job.sigmas.double())
    with pytest.raises(Refused, match=r"the tensor sigmas is of torch\.float64"):
        bench.run(job, PLANS[2])
    bench.assert_right(2)
    assert bench.workers() == before


def test_a_request_that_cannot_be_read_is_declined_and_the_workers_stay(bench):
    request = msgspec.structs.replace(SAMPLE, request=17)
    group = send(bench, encode(request, {"x": torch.zeros(3)}).replace(b"float32", b"float99"))
    before = bench.workers()
    event = group._channel.events.get(timeout=20)
    assert isinstance(event, Received)
    said = "the workers cannot read the request: tensor 'x' has the dtype 'float99'."
    assert event.frame.message == DeclinedReply(17, said)
    bench.assert_right(2)
    assert bench.workers() == before


# wire/test_frames refuses all bytes that are no frame
@pytest.mark.parametrize(
    "data",
    [pytest.param(data, id=name, marks=[thorough] * (name == "no frame")) for name, data in UNREADABLE.items()],
)
def test_other_unreadable_bytes_are_a_failure_with_its_cause(bench, data, caplog):
    """The next run raises the failure, or logs it if the workers ended before the run began."""
    send(bench, data)
    try:
        bench.run(bench.job, PLANS[2])
    except WorkerFailed as failure:
        said = str(failure)
        bench.assert_recovered(2)
    else:
        said = caplog.text
        bench.assert_right(2)
    assert re.search(r"Worker 0 of 2 \(cpu\) failed while idle: BadFrame: .*(not|dtype)", said)
