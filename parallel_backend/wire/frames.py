"""Framing: a length-prefixed msgpack header (message and tensor shapes), then the tensors' raw bytes.

Frame: magic (4 bytes), protocol (u16), header length (u32), header, tensor bytes in the header's order.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from .messages import PROTOCOL, Message, ToHost, ToWorker

MAGIC = b"PDIT"
PREFIX = struct.Struct("<4sHI")
MAX_HEADER_BYTES = 1 << 20
MAX_TENSOR_BYTES = 1 << 33

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int64)
}

Tensors = Mapping[str, Tensor]


class BadFrame(ValueError):
    """The bytes are not a frame of this protocol."""


class TensorShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Name, dtype and shape of one tensor of a frame."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The msgpack part of a frame."""

    message: msgspec.Raw
    tensors: tuple[TensorShape, ...]


class Frame(msgspec.Struct, frozen=True):
    """A decoded frame."""

    message: Any
    tensors: dict[str, Tensor]


def encode(message: Message, tensors: Tensors | None = None) -> bytes:
    """A message and CPU copies of its tensors as one frame."""
    flat = {name: tensor.detach().to("cpu").contiguous() for name, tensor in (tensors or {}).items()}
    shapes = tuple(
        TensorShape(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in flat.items()
    )
    header = msgspec.msgpack.encode(Header(msgspec.Raw(msgspec.msgpack.encode(message)), shapes))
    assert len(header) <= MAX_HEADER_BYTES, "a message has outgrown the header limit"
    data = [t.view(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b"" for t in flat.values()]
    return b"".join((PREFIX.pack(MAGIC, PROTOCOL, len(header)), header, *data))


class FrameDecoder:
    """Turns a stream of bytes into frames, checking sizes before anything is allocated or decoded.

    Args:
        accepts: the message types that may arrive (`ToHost` or `ToWorker`).
    """

    def __init__(self, accepts: Any) -> None:
        self._message = msgspec.msgpack.Decoder(accepts)
        self._header = msgspec.msgpack.Decoder(Header)
        self._buffer = bytearray()
        self._pending: tuple[Header, int] | None = None

    def feed(self, data: bytes) -> list[Frame]:
        """Add received bytes; returns the frames that are now complete.

        Raises:
            BadFrame: wrong magic, protocol, size or schema. The stream cannot be read on.
        """
        self._buffer += data
        frames = []
        while (frame := self._next()) is not None:
            frames.append(frame)
        return frames

    def _next(self) -> Frame | None:
        if self._pending is None:
            self._pending = self._read_header()
        if self._pending is None:
            return None
        header, size = self._pending
        if len(self._buffer) < size:
            return None
        payload = self._buffer[:size]
        del self._buffer[:size]
        self._pending = None
        try:
            message = self._message.decode(header.message)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise BadFrame(f"message not understood: {error}") from None
        return Frame(message, _tensors(header.tensors, payload))

    def _read_header(self) -> tuple[Header, int] | None:
        if len(self._buffer) < PREFIX.size:
            return None
        magic, protocol, length = PREFIX.unpack_from(self._buffer)
        if magic != MAGIC:
            raise BadFrame("these are not bytes of this protocol")
        if protocol != PROTOCOL:
            raise BadFrame(f"protocol {protocol} instead of {PROTOCOL}: both sides need the same version of the pack")
        if length > MAX_HEADER_BYTES:
            raise BadFrame(f"a header of {length} bytes is over the limit of {MAX_HEADER_BYTES}")
        if len(self._buffer) < PREFIX.size + length:
            return None
        raw = bytes(self._buffer[PREFIX.size : PREFIX.size + length])
        del self._buffer[: PREFIX.size + length]
        try:
            header = self._header.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise BadFrame(f"header not understood: {error}") from None
        size = sum(_nbytes(shape) for shape in header.tensors)
        if size > MAX_TENSOR_BYTES:
            raise BadFrame(f"a frame with {size} bytes of tensors is over the limit of {MAX_TENSOR_BYTES}")
        return header, size


def _nbytes(shape: TensorShape) -> int:
    dtype = DTYPES.get(shape.dtype)
    if dtype is None:
        raise BadFrame(f"tensor {shape.name!r} has the dtype {shape.dtype!r}")
    if any(n < 0 for n in shape.shape):
        raise BadFrame(f"tensor {shape.name!r} has the shape {shape.shape}")
    return math.prod(shape.shape) * dtype.itemsize


def _tensors(shapes: tuple[TensorShape, ...], payload: bytearray) -> dict[str, Tensor]:
    tensors, offset = {}, 0
    for shape in shapes:
        nbytes, dtype = _nbytes(shape), DTYPES[shape.dtype]
        raw = payload[offset : offset + nbytes]  # a copy of its own, so that its alignment fits any dtype
        flat = torch.frombuffer(raw, dtype=dtype) if nbytes else torch.empty(0, dtype=dtype)
        tensors[shape.name] = flat.view(shape.shape)
        offset += nbytes
    return tensors


def host_decoder() -> FrameDecoder:
    """A decoder of what workers send."""
    return FrameDecoder(ToHost)


def worker_decoder() -> FrameDecoder:
    """A decoder of what the host sends."""
    return FrameDecoder(ToWorker)
