"""Request bodies: read up to a limit, decoded in a thread, and refused with one sentence if they are wrong."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import msgspec
from aiohttp import web

BYTES = 1 << 20
"""Largest number of bytes of a body, unless its route has another limit."""

VALUES = 200_000
"""Largest number of values, at all levels, of a JSON body. A graph of a thousand nodes has about ten thousand."""

LEVELS = 64
"""Largest nesting depth of a JSON body: much more than a graph has, and much less than Python's recursion limit."""

LARGEST = 1 << 64
"""Upper limit of JSON integers, exclusive. Seeds have 64 bits."""

Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
"""A size in a request: pixels, frames, or rows of a batch."""

Name = Annotated[str, msgspec.Meta(max_length=4096)]
"""A file name in a request, for `check_name`. No file system allows a longer one."""


class WrongBody(ValueError):
    """A body that a route refuses, with the sentence for the user and the HTTP status of the reply."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Body(Protocol):
    """The form of a route's body."""

    @property
    def most(self) -> int:
        """Return the largest number of bytes of the body."""

    def decoded(self, content: bytes) -> Any:
        """Decode a body. Raise WrongBody if it is wrong."""


@dataclass(frozen=True)
class TextBody:
    """A body of UTF-8 text."""

    most: int = BYTES

    def decoded(self, content: bytes) -> str:
        """Decode a body. Raise WrongBody if it is wrong."""
        return _text(content)


@dataclass(frozen=True)
class JsonBody:
    """A JSON body with a value of `type`.

    Args:
        type: the value's type, for msgspec.
        what: the value's name in a sentence.
        most: the largest number of bytes.
        empty: the value of a body without bytes; None if such a body is an error.
    """

    type: Any
    what: str
    most: int = BYTES
    empty: Any = None

    def decoded(self, content: bytes) -> Any:
        """Decode a body. Raise WrongBody if it is wrong."""
        if not content and self.empty is not None:
            return self.empty
        try:
            value = msgspec.json.decode(_text(content))
            check_extent(value)
            return msgspec.convert(value, self.type)
        except RecursionError:
            raise WrongBody(_TOO_DEEP) from None
        except msgspec.DecodeError as error:
            raise WrongBody(f"The body is not {self.what}: {error}.") from None


def _text(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise WrongBody(f"The body is not UTF-8 (byte {error.start}): send text in UTF-8.") from None


_TOO_DEEP = f"The body nests deeper than {LEVELS} levels: send fewer levels."


def check_extent(value: Any) -> None:
    """Raise WrongBody if decoded JSON has too many values, too many levels, or an integer of more than 64 bits."""
    level, count = [value], 0
    for _ in range(LEVELS + 1):
        count += len(level)
        if count > VALUES:
            raise WrongBody(f"The body has more than {VALUES} values: send fewer values.")
        if any(isinstance(entry, int) and abs(entry) >= LARGEST for entry in level):
            raise WrongBody("The body has an integer of more than 64 bits: send a smaller number.")
        level = [inner for entry in level for inner in _inside(entry)]
        if not level:
            return
    raise WrongBody(_TOO_DEEP)


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


async def read(request: web.Request, most: int) -> bytes:
    """Return a request's body. Raise WrongBody once the body has more than `most` bytes, and read no further."""
    content = bytearray()
    async for part in request.content.iter_any():
        content += part
        if len(content) > most:
            message = f"The body has more than {most / 1e6:.1f} MB, the limit of this address: send less."
            raise WrongBody(message, 413)
    return bytes(content)


def check_name(name: str, *, inside: bool = False) -> None:
    """Raise ValueError for an invalid file name, or, with `inside`, for a name that leads out of its folder."""
    if "\0" in name:
        raise ValueError(f"{name!r} has a NUL, which no file's name has: leave it out")
    if inside and (os.path.isabs(name) or os.path.normpath(name).split(os.sep)[0] == os.pardir):
        raise ValueError(f"{name!r} is outside of ComfyUI's folders: name a file in them")
