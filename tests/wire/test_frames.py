"""Frames and tensors in shared memory arrive bit for bit, and frames that are too large or malformed are refused."""

import math
import os
from typing import get_args

import msgspec
import pytest
import torch

from parallel_backend.errors import Refused
from parallel_backend.wire.frames import (
    MAX_HEADER_BYTES,
    MAX_TENSOR_BYTES,
    PREFIX,
    BadFrame,
    Tensors,
    encode,
    mapped,
    share,
    worker_decoder,
)
from parallel_backend.wire.message import PROTOCOL, Message
from parallel_backend.wire.to_host import SampleStepReply, ToHost
from parallel_backend.wire.to_worker import CancelRequest, SampleRequest, ToWorker
from tests.wire.messages import SAMPLE, TENSORS


def test_the_name_of_every_message_says_its_direction() -> None:
    requests, replies = get_args(ToWorker), get_args(ToHost)
    assert {*requests, *replies} == set(Message.__subclasses__())
    assert [message.__name__ for message in requests if not message.__name__.endswith("Request")] == []
    assert [message.__name__ for message in replies if not message.__name__.endswith("Reply")] == []


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_a_frame_arrives_as_it_was_sent_however_the_stream_is_cut(piece: int) -> None:
    data = encode(SAMPLE, TENSORS) + encode(CancelRequest(3))
    decoder = worker_decoder()
    frames = [frame for start in range(0, len(data), piece) for frame in decoder.feed(data[start : start + piece])]
    assert [frame.message for frame in frames] == [SAMPLE, CancelRequest(3)]
    assert frames[0].tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert frames[0].tensors[name].dtype == tensor.dtype
        assert torch.equal(frames[0].tensors[name], tensor)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"GET / HTTP/1.1\r\n", "not bytes of this protocol"),
        (PREFIX.pack(b"PDIT", PROTOCOL + 1, 0, 4, 0), f"protocol {PROTOCOL + 1} instead of {PROTOCOL}"),
        (PREFIX.pack(b"PDIT", PROTOCOL, 0, MAX_HEADER_BYTES + 1, 0), "over the limit"),
        (
            PREFIX.pack(b"PDIT", PROTOCOL, 0, 4, MAX_TENSOR_BYTES + 1),  # refused before any memory is used
            f"a frame with {MAX_TENSOR_BYTES + 1} bytes of tensors is over the limit",
        ),
        pytest.param(
            encode(CancelRequest(3), {"x": torch.zeros(2**16 + 1)}).replace(
                b"\xce\x00\x01\x00\x01", b"\xce" + b"\xff" * 4
            ),
            "the tensors take 17179869180 bytes and the frame has 262148 of them",
            id="a tensor larger than its frame",
        ),
        (PREFIX.pack(b"PDIT", PROTOCOL, 0, 4, 0) + b"\xff\xff\xff\xff", "header not understood"),
        (encode(SampleStepReply(1, 2)), "message not understood"),
        (encode(CancelRequest(3)).replace(b"CancelRequest", b"RepealRequest"), "message not understood"),
        (encode(CancelRequest(3), {"x": torch.zeros(3)}).replace(b"float32", b"float99"), "dtype"),
    ],
)
def test_malformed_frames_are_refused(data: bytes, complaint: str) -> None:
    with pytest.raises(BadFrame, match=complaint):
        worker_decoder().feed(data)


@pytest.mark.parametrize("shape", [(0, 2**33, 2**33), (0, 2**64 - 1), (1,) * 9, (-1,)])
def test_a_shape_that_no_tensor_has_is_refused(shape: tuple[int, ...]) -> None:
    tensors = [{"name": "x", "dtype": "uint8", "shape": shape}]
    raw = msgspec.msgpack.encode({"message": msgspec.Raw(msgspec.msgpack.encode(CancelRequest(3))), "tensors": tensors})
    payload = bytes(max(0, math.prod(shape)))
    with pytest.raises(BadFrame):
        worker_decoder().feed(PREFIX.pack(b"PDIT", PROTOCOL, 0, len(raw), len(payload)) + raw + payload)


@pytest.mark.parametrize(
    ("message", "tensors", "complaint"),
    [
        (
            SAMPLE,
            {"x": torch.zeros(2, dtype=torch.float64)},
            r"the tensor x is of torch\.float64, and only float32, .* convert",
        ),
        (SAMPLE, {"x": torch.zeros((1,) * 9)}, "the tensor x has 9 dimensions and 8 are the limit"),
        (SAMPLE, {str(number): torch.zeros(1) for number in range(4097)}, "4097 tensors is over the limit of 4096"),
        (SAMPLE, {"x": torch.zeros(1).expand(2**31 + 1)}, r"8\.6 GB of tensors is over the limit"),
        (
            msgspec.structs.replace(SAMPLE, positive=SAMPLE.positive * 20_000),
            {},
            r"the description of the message SampleRequest takes \d+ bytes and 1048576 are the limit",
        ),
        (
            msgspec.structs.replace(SAMPLE, request=2**64),
            {},
            "a number or name in the message SampleRequest cannot be sent",
        ),
        (
            msgspec.structs.replace(SAMPLE, compiler="\udcff"),
            {},
            "a number or name in the message SampleRequest cannot be sent",
        ),
    ],
)
def test_a_message_that_the_other_side_would_refuse_is_not_sent(
    message: SampleRequest, tensors: Tensors, complaint: str
) -> None:
    with pytest.raises(Refused, match=complaint):
        encode(message, tensors)


def test_the_number_of_a_request_with_unreadable_tensors_is_known() -> None:
    with pytest.raises(BadFrame) as raised:
        worker_decoder().feed(encode(SAMPLE, TENSORS).replace(b"bfloat16", b"float128"))
    assert raised.value.request == SAMPLE.request


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 2, 5, 7), (0, 4), ()])
def test_a_shared_tensor_arrives_unchanged_and_leaves_no_open_file(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    before = open_files()
    tensor = torch.randn(shape).to(dtype)
    received = mapped(share(tensor), dtype, shape)
    assert torch.equal(received, tensor)
    del received
    assert open_files() == before


def test_a_tensor_may_be_larger_than_dev_shm_in_containers() -> None:
    tensor = torch.arange(20 << 20, dtype=torch.float32)  # 80 MB
    received = mapped(share(tensor), torch.float32, tensor.shape)
    assert received[-1] == tensor[-1]
    received += 1  # the receiver may write to its tensor, and the sender's stays
    assert tensor[0] == 0


def test_another_size_than_announced_is_refused() -> None:
    before = open_files()
    with pytest.raises(ValueError, match="40 bytes of shared memory were received instead of 44"):
        mapped(share(torch.zeros(10)), torch.float32, (11,))
    assert open_files() == before
