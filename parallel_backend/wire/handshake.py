"""The handshake of a TCP connection: both ends prove that they hold the same secret before they decode the other's messages.

    listener  magic, protocol (u16), nonce (32 bytes)
    caller    magic, protocol (u16), role (u16), nonce (32), HMAC-SHA256(secret, "caller", protocol, role, both nonces)
    listener  verdict (u8), generation (u64), HMAC-SHA256(secret, "listener", verdict, generation, both nonces)

All fields have a fixed size. The secret never travels, and nonces are never used twice. The two labels keep one side's proof
from serving as the other's. The bytes after the handshake are not encrypted. They are authentic only as far as the network
keeps connections apart.
"""

from __future__ import annotations

import enum
import hmac
import os
import secrets
import socket
import stat
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ..errors import Refused
from .frames import MAGIC
from .message import PROTOCOL

CLIENT = 0xFFFF
"""The role of ComfyUI; the other roles are ranks."""

SECONDS = 10.0
"""Seconds that the whole handshake may take."""

LOST_SECONDS = 15
"""Seconds without a sign of life from its machine after which a peer is given up."""

GREETING = struct.Struct("<4sH32s")
ANSWER = struct.Struct("<4sHH32s32s")
RESULT = struct.Struct("<BQ32s")


class HandshakeVerdict(enum.IntEnum):
    """The listener's decision about a caller."""

    ADMITTED = 0
    WRONG_SECRET = 1
    WRONG_PROTOCOL = 2
    UNEXPECTED = 3
    CROWDED = 4


class HandshakeFailed(ConnectionError):
    """The other side failed to prove its identity, or rejected this side. The connection is of no use."""

    def __init__(self, reason: str, verdict: HandshakeVerdict | None = None) -> None:
        super().__init__(reason)
        self.verdict = verdict


class Crowded(ConnectionError):
    """The listener closed this connection, which had shown no secret, in favour of newer connections. A new try may succeed."""


class Stranger:
    """The listener's side of a handshake, which never blocks. The caller has not shown yet that it holds the secret.

    Args:
        connection: the accepted connection. It does not block until `admit` has returned.

    Raises:
        OSError: the caller is gone already.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.until = time.monotonic() + SECONDS
        """The time by which the caller must have answered."""
        self._nonce = secrets.token_bytes(32)
        self._answer = b""
        connection.setblocking(False)
        connection.sendall(GREETING.pack(MAGIC, PROTOCOL, self._nonce))

    def receive(self) -> bool:
        """Read the bytes that have arrived; return True if the answer is complete. Raises OSError if the caller has left."""
        try:
            piece = self.connection.recv(ANSWER.size - len(self._answer))
        except BlockingIOError:  # its file number belonged to another connection a moment ago
            return False
        if not piece:
            raise ConnectionResetError("the connection was closed during the handshake")
        self._answer += piece
        return len(self._answer) == ANSWER.size

    def admit(self, secret: bytes, generation: int, welcome: Callable[[int], bool]) -> int:
        """Check the complete answer, send the verdict and return the caller's role. The connection blocks from here on.

        Args:
            welcome: returns True if the group expects a caller in this role.

        Raises:
            HandshakeFailed: the caller was rejected.
            OSError: the caller went away.
        """
        magic, protocol, role, theirs, proof = ANSWER.unpack(self._answer)
        if magic != MAGIC:
            raise HandshakeFailed("it does not use this protocol")
        if protocol != PROTOCOL:
            verdict = HandshakeVerdict.WRONG_PROTOCOL
        elif not hmac.compare_digest(proof, _caller_proof(secret, role, self._nonce, theirs)):
            verdict = HandshakeVerdict.WRONG_SECRET
        else:
            verdict = HandshakeVerdict.ADMITTED if welcome(role) else HandshakeVerdict.UNEXPECTED
        if verdict is not HandshakeVerdict.ADMITTED:
            self.tell(verdict)
            protocols = (
                f" (protocol {protocol} instead of {PROTOCOL})" if verdict is HandshakeVerdict.WRONG_PROTOCOL else ""
            )
            raise HandshakeFailed(verdict.name.lower().replace("_", " ") + protocols, verdict)
        ours = _listener_proof(secret, verdict, generation, self._nonce, theirs)
        self.connection.sendall(RESULT.pack(verdict, generation, ours))
        make_ready(self.connection)
        return int(role)

    def tell(self, verdict: HandshakeVerdict) -> None:
        """Send the caller the verdict. Raises OSError if the caller has left."""
        self.connection.sendall(RESULT.pack(verdict, 0, bytes(32)))


def present(connection: socket.socket, secret: bytes, role: int) -> int:
    """Do the caller's side of a handshake and return the generation of the group.

    Raises:
        HandshakeFailed: the listener rejects this side, or does not hold the secret.
        Crowded: the listener closed the connection to make room. Another try may succeed.
        OSError: the listener went away or was too slow.
    """
    until = time.monotonic() + SECONDS
    connection.settimeout(SECONDS)
    magic, protocol, theirs = GREETING.unpack(_receive(connection, GREETING.size, until))
    if magic != MAGIC:
        raise HandshakeFailed("the program at that address is not a worker of this pack")
    ours = secrets.token_bytes(32)
    proof = _caller_proof(secret, role, theirs, ours) if protocol == PROTOCOL else bytes(32)
    connection.sendall(ANSWER.pack(MAGIC, PROTOCOL, role, ours, proof))
    if protocol != PROTOCOL:
        raise HandshakeFailed(
            f"it uses protocol {protocol} and this side uses {PROTOCOL}: install the same version of the pack on both",
            HandshakeVerdict.WRONG_PROTOCOL,
        )
    number, generation, proof = RESULT.unpack(_receive(connection, RESULT.size, until))
    if number == HandshakeVerdict.WRONG_SECRET:
        raise HandshakeFailed(
            "the secrets differ: use the same secret file on all machines", HandshakeVerdict.WRONG_SECRET
        )
    if number == HandshakeVerdict.CROWDED:
        raise Crowded("it has too many open connections that have not shown the secret, and closed this one")
    if number != HandshakeVerdict.ADMITTED:
        raise HandshakeFailed("it expects no worker with this rank", HandshakeVerdict.UNEXPECTED)
    if not hmac.compare_digest(proof, _listener_proof(secret, HandshakeVerdict.ADMITTED, generation, theirs, ours)):
        raise HandshakeFailed("the program at that address does not have the secret", HandshakeVerdict.WRONG_SECRET)
    make_ready(connection)
    return int(generation)


def make_ready(connection: socket.socket) -> None:
    """Make the kernel end an admitted connection LOST_SECONDS after its peer's last sign of life."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, LOST_SECONDS // 3),
        (socket.TCP_KEEPINTVL, LOST_SECONDS // 3),
        (socket.TCP_KEEPCNT, 2),
        (socket.TCP_USER_TIMEOUT, LOST_SECONDS * 1000),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _caller_proof(secret: bytes, role: int, listener: bytes, caller: bytes) -> bytes:
    text = b"caller" + struct.pack("<HH", PROTOCOL, role) + listener + caller
    return hmac.digest(secret, text, "sha256")


def _listener_proof(secret: bytes, verdict: HandshakeVerdict, generation: int, listener: bytes, caller: bytes) -> bytes:
    return hmac.digest(secret, b"listener" + struct.pack("<BQ", verdict, generation) + listener + caller, "sha256")


def _receive(connection: socket.socket, size: int, until: float) -> bytes:
    data = b""
    while len(data) < size:
        remaining = until - time.monotonic()
        if remaining <= 0:
            raise TimeoutError(f"no handshake within {SECONDS:.0f} s")
        connection.settimeout(remaining)
        piece = connection.recv(size - len(data))
        if not piece:
            raise ConnectionResetError("the connection was closed during the handshake")
        data += piece
    return data


VARIABLE = "PARALLEL_SECRET_FILE"
MIN_BYTES = 16
MAX_BYTES = 4096


def secret_path(variables: Mapping[str, str], option: str | None = None) -> Path:
    """Return the file of the option, else of the environment, else ~/.config/comfyui-parallel/secret."""
    return Path(option or variables.get(VARIABLE) or Path.home() / ".config" / "comfyui-parallel" / "secret")


def read_secret(path: Path) -> bytes:
    """Return the secret in a file, without white space around the secret.

    Raises:
        Refused: the file cannot be read, other users have access to it or own it, or the secret is too short or too long.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            text = file.read(MAX_BYTES + 1).strip()
    except OSError as error:
        raise Refused(
            f"the secret of the workers on other machines cannot be read from {path} ({error.strerror}): copy the "
            f"workers' secret file there, or set {VARIABLE} to its path."
        ) from None
    if stat.S_IMODE(status.st_mode) & 0o077 or status.st_uid != os.geteuid():
        raise Refused(
            f"{path} holds a secret, and other users can read it or own it: run chmod 600 on it, and chown it to the "
            "current user."
        )
    if not MIN_BYTES <= len(text) <= MAX_BYTES:
        raise Refused(
            f"{path} holds {len(text)} bytes and a secret has {MIN_BYTES} to {MAX_BYTES}: make one with "
            f"head -c 32 /dev/urandom | base64."
        )
    return text
