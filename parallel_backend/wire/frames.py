"""Framing: a length-prefixed msgpack header (message and tensor shapes), then the tensors' raw bytes.

Frame: magic (4 bytes), protocol (u16), rank (u16), header length (u32), length of the tensors' bytes (u64), header,
tensor bytes in the header's order. The rank is that of the worker that sent the frame; the host writes 0.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

from ..errors import Refused
from .message import PROTOCOL, Message
from .to_host import ToHost
from .to_worker import ToWorker

MAGIC = b"PDIT"
PREFIX = struct.Struct("<4sHHIQ")
MAX_HEADER_BYTES = 1 << 20
MAX_TENSOR_BYTES = 1 << 33
MAX_TENSORS = 4096
MAX_DIMS = 8

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int32, torch.int64)
}

Tensors = Mapping[str, Tensor]


class BadFrame(ValueError):
    """The bytes are not a frame of this protocol. `request` is the number of the frame's request, if it is known."""

    request: int | None = None


class TensorShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Name, dtype and shape of one tensor of a frame."""

    name: str
    dtype: str
    shape: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0, le=MAX_TENSOR_BYTES)], ...], msgspec.Meta(max_length=MAX_DIMS)
    ]


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The msgpack part of a frame."""

    message: msgspec.Raw
    tensors: Annotated[tuple[TensorShape, ...], msgspec.Meta(max_length=MAX_TENSORS)]


class Frame(msgspec.Struct, frozen=True):
    """A decoded frame, and the rank that sent it."""

    message: Any
    tensors: dict[str, Tensor]
    rank: int = 0


class RawFrame(msgspec.Struct, frozen=True):
    """A complete frame of this protocol with undecoded content."""

    rank: int
    header: bytes
    payload: bytearray

    @property
    def data(self) -> bytes:
        """Return the bytes of the frame."""
        return b"".join((_prefix(self.rank, len(self.header), len(self.payload)), self.header, self.payload))


def encode(message: Message, tensors: Tensors | None = None, rank: int = 0) -> bytes:
    """Return a message and CPU copies of its tensors as one frame. `rank` is the sender's.

    Raises:
        Refused: the decoder of the other side would reject the frame.
    """
    _check_tensors(tensors or {})
    flat = {name: tensor.detach().to("cpu").contiguous() for name, tensor in (tensors or {}).items()}
    shapes = tuple(
        TensorShape(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in flat.items()
    )
    try:
        header = msgspec.msgpack.encode(Header(msgspec.Raw(msgspec.msgpack.encode(message)), shapes))
    except (OverflowError, UnicodeEncodeError) as error:
        raise Refused(f"a number or name in {_named(message)} cannot be sent ({error}): choose another one.") from None
    if len(header) > MAX_HEADER_BYTES:
        raise Refused(
            f"the description of {_named(message)} takes {len(header)} bytes and {MAX_HEADER_BYTES} are the limit: combine "
            "fewer prompts."
        )
    data = [t.view(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b"" for t in flat.values()]
    return b"".join((_prefix(rank, len(header), sum(map(len, data))), header, *data))


def _named(message: Message) -> str:
    return f"the message {type(message).__name__}"


def _check_tensors(tensors: Tensors) -> None:
    """Raise Refused where a decoder would raise BadFrame."""
    if len(tensors) > MAX_TENSORS:
        raise Refused(
            f"a message with {len(tensors)} tensors is over the limit of {MAX_TENSORS}: combine fewer prompts."
        )
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES.values():
            raise Refused(
                f"the tensor {name} is of {tensor.dtype}, and only {', '.join(DTYPES)} are sent to workers: convert it."
            )
        if tensor.ndim > MAX_DIMS:
            raise Refused(f"the tensor {name} has {tensor.ndim} dimensions and {MAX_DIMS} are the limit: reshape it.")
    size = sum(tensor.nbytes for tensor in tensors.values())
    if size > MAX_TENSOR_BYTES:
        raise Refused(
            f"a message with {size / 1e9:.1f} GB of tensors is over the limit of {MAX_TENSOR_BYTES / 1e9:.1f} GB: use a "
            "smaller batch or size, or fewer frames at a time."
        )


def _prefix(rank: int, header: int, payload: int) -> bytes:
    return PREFIX.pack(MAGIC, PROTOCOL, rank, header, payload)


class FrameCutter:
    """A splitter of a byte stream into complete frames. It checks the sizes in a prefix before it stores the frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def partial(self) -> bool:
        """Return True if a part of a frame has arrived."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> list[RawFrame]:
        """Add received bytes and return the frames that are now complete.

        Raises:
            BadFrame: wrong magic, protocol or size. The stream cannot be read on.
        """
        self._buffer += data
        frames = []
        while (frame := self._next()) is not None:
            frames.append(frame)
        return frames

    def _next(self) -> RawFrame | None:
        if not MAGIC.startswith(self._buffer[: len(MAGIC)]):
            raise BadFrame("these are not bytes of this protocol")
        if len(self._buffer) < PREFIX.size:
            return None
        _, protocol, rank, length, size = PREFIX.unpack_from(self._buffer)
        if protocol != PROTOCOL:
            raise BadFrame(f"protocol {protocol} instead of {PROTOCOL}: both sides need the same version of the pack")
        if length > MAX_HEADER_BYTES:
            raise BadFrame(f"a header of {length} bytes is over the limit of {MAX_HEADER_BYTES}")
        if size > MAX_TENSOR_BYTES:
            raise BadFrame(f"a frame with {size} bytes of tensors is over the limit of {MAX_TENSOR_BYTES}")
        start = PREFIX.size + length
        if len(self._buffer) < start + size:
            return None
        frame = RawFrame(rank, bytes(self._buffer[PREFIX.size : start]), self._buffer[start : start + size])
        del self._buffer[: start + size]
        return frame


# Made while there is one thread: msgspec analyses a type when it is first needed, and crashes if two threads do so at once.
_HEADER = msgspec.msgpack.Decoder(Header)
_TO_HOST: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToHost)
_TO_WORKER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToWorker)


class FrameDecoder:
    """A decoder of a byte stream into checked frames.

    Args:
        message: decodes the message types that may arrive.
    """

    def __init__(self, message: msgspec.msgpack.Decoder[Any]) -> None:
        self._message = message
        self._cutter = FrameCutter()

    def feed(self, data: bytes) -> list[Frame]:
        """Add received bytes and return the frames that are now complete.

        Raises:
            BadFrame: wrong magic, protocol, size or schema. The stream cannot be read on.
        """
        return [self.decode(frame) for frame in self._cutter.feed(data)]

    def decode(self, frame: RawFrame) -> Frame:
        """Decode a frame.

        Raises:
            BadFrame: the frame does not follow the schema.
        """
        try:
            header = _HEADER.decode(frame.header)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise BadFrame(f"header not understood: {error}") from None
        try:
            message = self._message.decode(header.message)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise BadFrame(f"message not understood: {error}") from None
        try:
            size = sum(_nbytes(shape) for shape in header.tensors)
            if size != len(frame.payload):
                raise BadFrame(f"the tensors take {size} bytes and the frame has {len(frame.payload)} of them")
        except BadFrame as error:
            error.request = getattr(message, "request", None)
            raise
        return Frame(message, _tensors(header.tensors, frame.payload), frame.rank)


def _nbytes(shape: TensorShape) -> int:
    dtype = DTYPES.get(shape.dtype)
    if dtype is None:
        raise BadFrame(f"tensor {shape.name!r} has the dtype {shape.dtype!r}")
    if math.prod(max(n, 1) for n in shape.shape) > MAX_TENSOR_BYTES:  # a size of 0 must not hide the others
        raise BadFrame(f"tensor {shape.name!r} of shape {shape.shape} is over the limit of {MAX_TENSOR_BYTES} bytes")
    return math.prod(shape.shape) * dtype.itemsize


def _tensors(shapes: tuple[TensorShape, ...], payload: bytearray) -> dict[str, Tensor]:
    tensors, offset = {}, 0
    for shape in shapes:
        nbytes, dtype = _nbytes(shape), DTYPES[shape.dtype]
        raw = payload[offset : offset + nbytes]  # a separate copy, whose alignment fits any dtype
        flat = torch.frombuffer(raw, dtype=dtype) if nbytes else torch.empty(0, dtype=dtype)
        tensors[shape.name] = flat.view(shape.shape)
        offset += nbytes
    return tensors


def host_decoder() -> FrameDecoder:
    """Return a decoder of messages to the host."""
    return FrameDecoder(_TO_HOST)


def worker_decoder() -> FrameDecoder:
    """Return a decoder of messages to a worker."""
    return FrameDecoder(_TO_WORKER)


def share(tensor: Tensor) -> int:
    """Copy a tensor into shared memory and return the descriptor, which the caller closes.

    Raises:
        OSError: there is no memory left.
    """
    flat = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
    descriptor = os.memfd_create("parallel", os.MFD_CLOEXEC)
    try:
        view, offset = memoryview(flat.numpy().data), 0
        while offset < len(view):
            offset += os.write(descriptor, view[offset:])
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def mapped(descriptor: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor in shared memory without a copy, and close the descriptor.

    Raises:
        ValueError: the memory has another size than the tensor.
    """
    try:
        size = torch.Size(shape).numel() * dtype.itemsize
        if os.fstat(descriptor).st_size != size:
            raise ValueError(f"{os.fstat(descriptor).st_size} bytes of shared memory were received instead of {size}")
        if not size:
            return torch.empty(shape, dtype=dtype)
        memory = mmap.mmap(descriptor, size)
        return torch.frombuffer(memory, dtype=dtype).view(shape)
    finally:
        os.close(descriptor)
