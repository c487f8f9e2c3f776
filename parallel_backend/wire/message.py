"""The base class of every message, and the version of the protocol."""

from __future__ import annotations

import msgspec

PROTOCOL = 21
"""Version of the messages and their framing, the same on both sides. Every change of either raises it by one."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base class of all messages. A message's tensors travel next to it, by name."""
