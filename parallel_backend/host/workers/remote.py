"""Workers that torchrun started on other machines: the connection to them, and a substitute for their processes."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ...clock import AwakeClock
from ...errors import Cancelled, PlanRefused
from ...wire.address import SCHEME, Address
from ...wire.frames import BadFrame, FrameDecoder, encode, host_decoder
from ...wire.handshake import CLIENT, Crowded, HandshakeFailed, present, read_secret, secret_path
from ...wire.message import Message
from ...wire.to_host import ConnectReply, RankFacts, RankLostReply, WaitingReply, WelcomeReply
from ...wire.to_worker import ShutdownRequest
from .channel import GATEWAY, Channel
from .processes import WorkerProcess

CONNECT_SECONDS = 60.0
"""Seconds to wait for a group that has not started, or starts anew."""

ASK_SECONDS = 30.0
"""Seconds to wait if nothing has been sampled yet: most likely nobody has started the group."""

TRY_SECONDS = 0.5

LONGEST_TRY = 20.0
"""Largest number of seconds between two tries, connecting and handshake included.

A longer time means that this process was paused, and counts as this many.
"""


def is_remote(device: str) -> bool:
    """Return True if a plan's `devices`, or one of its device names, belongs to workers on other machines."""
    return device.strip().startswith(SCHEME)


def device_names(address: Address, members: tuple[RankFacts, ...]) -> tuple[str, ...]:
    """Return the plan's name for each rank's device: address, host and device."""
    return tuple(f"{address}/{member.host}/{member.device}" for member in members)


def address_of(device: str) -> Address:
    """Return the address in a device name."""
    return Address.parse(device.removeprefix(SCHEME).split("/")[0])


def ask(address: Address, seconds: float = ASK_SECONDS) -> tuple[RankFacts, ...]:
    """Return the facts of the ranks at an address. Any number of clients may ask, also while the ranks serve another client.

    Raises:
        Refused: nobody answers there, or the workers refuse this client. The message says why.
    """
    connection, members, _ = _connect(address, seconds, lambda: False)
    connection.close()
    return members


def _connect(
    address: Address, seconds: float, is_cancelled: Callable[[], bool]
) -> tuple[socket.socket, tuple[RankFacts, ...], FrameDecoder]:
    """Return the connection, the facts of the ranks, and the decoder that has read so far."""
    secret = read_secret(secret_path(os.environ))
    clock = AwakeClock(LONGEST_TRY)
    until = clock.now() + seconds
    while True:
        connection = None
        try:
            connection = socket.create_connection((address.host, address.port), timeout=min(5.0, seconds))
            present(connection, secret, CLIENT)
            return connection, *_welcomed(connection, clock, until, is_cancelled)
        except HandshakeFailed as error:
            _close(connection)
            raise PlanRefused(f"the workers at {address} refused the connection: {error}.") from None
        except (OSError, BadFrame) as error:
            _close(connection)
            if isinstance(error, socket.gaierror) or clock.now() > until:
                if isinstance(error, Crowded):
                    raise PlanRefused(
                        f"the workers at {address} accepted no connection for {seconds:.0f} s ({error}): stop the "
                        "program that keeps connecting to that port, such as a scanner, or block it, and queue again."
                    ) from None
                raise PlanRefused(
                    f"no workers answer at {address} ({error}): start them there with torchrun ... -m "
                    f"parallel_backend.worker --listen {str(address).removeprefix(SCHEME)}, or correct the address."
                ) from None
        except BaseException:
            _close(connection)
            raise
        if is_cancelled():
            raise Cancelled
        time.sleep(TRY_SECONDS)


def _close(connection: socket.socket | None) -> None:
    if connection is not None:
        connection.close()


def _welcomed(
    connection: socket.socket, clock: AwakeClock, until: float, is_cancelled: Callable[[], bool]
) -> tuple[tuple[RankFacts, ...], FrameDecoder]:
    """Wait until all ranks of the group have connected. Return their facts and the decoder."""
    decoder, waiting = host_decoder(), ""
    connection.settimeout(TRY_SECONDS)
    while True:
        try:
            data = connection.recv(1 << 16)
        except TimeoutError:
            if is_cancelled():
                raise Cancelled from None
            if clock.now() > until:
                raise TimeoutError(waiting or "they sent no reply") from None
            continue
        if not data:
            raise ConnectionResetError("the group ended while it was starting")
        for frame in decoder.feed(data):
            match frame.message:
                case WaitingReply(missing=missing, rejection=rejection):
                    ranks = ", ".join(map(str, missing))
                    waiting = f"rank {ranks} has not connected yet" + (
                        f"; a connection was refused: {rejection}" if rejection else ""
                    )
                case WelcomeReply(members=members) if members:
                    connection.settimeout(None)
                    return members, decoder


class RemoteChannel(Channel):
    """A channel over one connection to the gateway of a group, whose frames name their ranks.

    Attributes:
        members: the facts of all ranks, in rank order.

    Raises:
        Refused: as in `ask`.
        Cancelled: `is_cancelled` returned True.
    """

    def __init__(self, address: Address, is_cancelled: Callable[[], bool]) -> None:
        super().__init__(secrets.randbits(63))
        self._connection, self.members, decoder = _connect(address, CONNECT_SECONDS, is_cancelled)
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._read, args=(decoder,), name="parallel-channel", daemon=True)
        self._thread.start()

    def send(self, rank: int, message: Message, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Send a message as in Channel. The gateway passes everything to rank 0."""
        assert rank == 0
        with self._sending:
            self._connection.sendall(encode(message, tensors))

    def close(self) -> None:
        """End the connection. A connection that is gone already is no error."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # closed by the other side
        self._thread.join()
        self._connection.close()

    def give_up(self) -> None:
        """Make the group end, as in Channel. torchrun's agents start it anew."""
        try:
            self.send(0, ShutdownRequest())
        except OSError:
            pass  # it is over already

    def _read(self, decoder: FrameDecoder) -> None:
        reason = ""
        try:
            while data := self._connection.recv(1 << 20):
                for frame in decoder.feed(data):
                    match frame.message:
                        case RankLostReply(rank=rank, reason=cause):
                            self.lose(rank, cause)
                        case ConnectReply():
                            raise BadFrame("a client received a ConnectReply")
                        case _ if frame.rank < len(self.members):
                            self.take(frame.rank, frame)
        except (OSError, BadFrame) as error:
            reason = str(error)
        self.lose(GATEWAY, reason)


@dataclass
class RemoteProcesses:
    """A substitute for the processes of a group on other machines. torchrun owns the processes and their logs."""

    address: Address
    processes: list[WorkerProcess] = field(default_factory=list)

    def log_tail(self, rank: int, lines: int = 12) -> str:
        """Return an empty string: the log is on the rank's machine."""
        return ""

    def end(self, grace: float) -> None:
        """Do nothing: the workers stay for the next client, or their agent starts them anew."""
