"""Rank 0's gateway: one open port for all messages of ComfyUI and of the other ranks.

Each rank keeps one connection to the gateway for its whole life. ComfyUI is a client, which connects and leaves. Frames of all
ranks go to the client that has joined, and the client's frames go to rank 0. The gateway decodes nothing before a caller has
shown that it holds the secret. If a rank is lost, the group ends: this process exits, and the other ranks find their
connections closed and exit too. Torchrun starts them again. A client that leaves or sends an invalid frame loses only its own
connection.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import NoReturn

from ...wire.frames import BadFrame, FrameCutter, RawFrame, encode, host_decoder, worker_decoder
from ...wire.handshake import CLIENT, SECONDS, HandshakeFailed, HandshakeVerdict, Stranger
from ...wire.message import Message
from ...wire.to_host import BusyReply, ConnectReply, RankFacts, RankLostReply, WaitingReply, WelcomeReply
from ...wire.to_worker import AbandonRequest, JoinRequest, RecoverRequest, ShutdownRequest
from .environment import ListeningWorker

log = logging.getLogger(__name__)

STRANGERS = 256
"""Largest number of connections in their handshake. For one more, the oldest is closed.

A caller that holds the secret shows it at once, so its handshake ends before it is the oldest.
"""

SEND_SECONDS = 60
"""Seconds after which a client that does not read is dropped."""

LINGER_SECONDS = 2.0
"""Seconds for which a failed group stays, so that the reports of all its ranks reach the client."""


class Gateway:
    """The server at rank 0's port. It listens from its construction on, and ends this process when the group ends.

    Args:
        settings: the address to listen at, and the secret.
        ranks: the number of ranks.
        generation: a number that is unique to this start of the group.

    Raises:
        OSError: the address is not of this machine, or the port is in use.
    """

    def __init__(self, settings: ListeningWorker, ranks: int, generation: int) -> None:
        self._settings = settings
        self._generation = generation
        self._size = ranks
        self._ranks: dict[int, _GatewayPeer] = {}
        self._facts: dict[int, RankFacts] = {}
        self._client: _GatewayPeer | None = None
        self._rejection = ""
        self._ending = False
        self._changed = threading.Condition()
        self._strangers: dict[int, tuple[_GatewayPeer, Stranger]] = {}
        """Callers in their handshake by file descriptor, the oldest first. Only the accepting thread uses it."""
        address = settings.address
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self._listener = socket.create_server((address.host, address.port), family=family)
        _start(self._accept)

    def own_connection(self) -> socket.socket:
        """Return rank 0's own connection, inside this process."""
        ours, theirs = socket.socketpair()
        peer = _GatewayPeer(ours, "this machine")
        self._ranks[0] = peer
        _start(self._serve_rank, peer, 0)
        return theirs

    def _accept(self) -> None:
        """Accept callers and run their handshakes, all in one thread, so that silent callers cost little."""
        self._listener.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._ending:
                for key, _ in selector.select(timeout=0.5):
                    if key.fileobj is self._listener:
                        self._meet(selector)
                    elif key.fd in self._strangers:
                        self._hear(selector, key.fd)
                now = time.monotonic()
                for fd in [fd for fd, (_, stranger) in self._strangers.items() if stranger.until < now]:
                    self._turn_away(selector, fd, TimeoutError(f"no handshake within {SECONDS:.0f} s"))

    def _meet(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, (host, port, *_) = self._listener.accept()
        except BlockingIOError:
            return  # the caller has left
        except OSError:  # the listener was closed, or the process is out of file descriptors
            if not self._ending:
                self._make_room(selector)
                time.sleep(0.1)
            return
        if len(self._strangers) >= STRANGERS:
            self._make_room(selector)
        try:
            stranger = Stranger(connection)
        except OSError:
            connection.close()
            return
        self._strangers[connection.fileno()] = _GatewayPeer(connection, f"{host}:{port}"), stranger
        selector.register(connection, selectors.EVENT_READ)

    def _make_room(self, selector: selectors.BaseSelector) -> None:
        """Close the connection of the oldest stranger."""
        for fd, (_, stranger) in self._strangers.items():
            with contextlib.suppress(OSError):
                stranger.tell(HandshakeVerdict.CROWDED)
            crowd = f"{len(self._strangers)} connections have not shown the secret, and this is the oldest"
            self._turn_away(selector, fd, ConnectionError(crowd))
            return

    def _hear(self, selector: selectors.BaseSelector, fd: int) -> None:
        """Read from a stranger. Serve the stranger once it has shown the secret."""
        peer, stranger = self._strangers[fd]
        try:
            if not stranger.receive():
                return
            role = stranger.admit(self._settings.secret, self._generation, self._expects)
        except OSError as error:
            self._turn_away(selector, fd, error)
            return
        del self._strangers[fd]
        selector.unregister(fd)
        _start(self._admit, peer, role)

    def _turn_away(self, selector: selectors.BaseSelector, fd: int, error: OSError) -> None:
        peer, _ = self._strangers.pop(fd)
        log.warning("a connection from %s was refused: %s", peer.name, error)
        if isinstance(error, HandshakeFailed):
            self._rejection = f"{peer.name}: {error}"
        selector.unregister(fd)
        peer.connection.close()

    def _admit(self, peer: _GatewayPeer, role: int) -> None:
        if role == CLIENT:
            self._serve_client(peer)
            return
        with self._changed:
            came_twice = role in self._ranks
            self._ranks.setdefault(role, peer)
        if came_twice:  # the rank was restarted before its old connection is known to be dead
            self._end(f"rank {role} connected a second time, from {peer.name}")
        self._serve_rank(peer, role)

    def _expects(self, role: int) -> bool:
        return role == CLIENT or 0 < role < self._size

    def _serve_rank(self, peer: _GatewayPeer, rank: int) -> None:
        reason = "the connection was closed"
        try:
            for frame in peer.frames():
                if rank not in self._facts:
                    self._introduce(rank, frame)
                client = self._client
                if client is not None:
                    client.send(RawFrame(rank, frame.header, frame.payload).data)
        except (OSError, BadFrame) as error:
            reason = str(error)
        self._send_to_client(RankLostReply(rank, reason))
        self._end(f"rank {rank} ({peer.name}) was lost: {reason}")

    def _introduce(self, rank: int, frame: RawFrame) -> None:
        hello = host_decoder().decode(frame).message
        if not isinstance(hello, ConnectReply):
            raise BadFrame("a rank begins with a ConnectReply")
        with self._changed:
            self._facts[rank] = hello.facts
            self._changed.notify_all()

    def _serve_client(self, peer: _GatewayPeer) -> None:
        decoder = worker_decoder()
        timeout = struct.pack("ll", SEND_SECONDS, 0)
        peer.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        peer.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SEND_SECONDS * 1000)  # it may be paused
        reason = "it disconnected"
        try:
            self._welcome(peer)
            for frame in peer.frames():
                message = decoder.decode(frame).message
                if isinstance(message, ShutdownRequest):
                    self._end(f"the client {peer.name} has ended the group")
                if isinstance(message, AbandonRequest) or (
                    self._client is not peer and not isinstance(message, JoinRequest)
                ):
                    raise BadFrame(f"unexpected {type(message).__name__}")
                if isinstance(message, JoinRequest) and not self._take(peer):
                    break
                for rank in self._ranks.values() if isinstance(message, RecoverRequest) else [self._ranks[0]]:
                    rank.send(frame.data)
        except (OSError, BadFrame) as error:
            reason = str(error)
        log.info("the client %s: %s", peer.name, reason)
        peer.connection.close()
        with self._changed:
            if self._client is not peer:
                return
            self._client = None
            self._changed.notify_all()
        self._ranks[0].send(encode(AbandonRequest()))

    def _welcome(self, peer: _GatewayPeer) -> None:
        """Wait until all ranks are connected, report missing ranks to the client meanwhile, and send it their facts."""
        reported: WaitingReply | None = None
        while True:
            with self._changed:
                missing = tuple(rank for rank in range(self._size) if rank not in self._facts)
                if not missing:
                    break
                self._changed.wait(1)
            waiting = WaitingReply(missing, self._rejection)
            if waiting != reported:
                peer.send_or_raise(encode(waiting))
                reported = waiting
        peer.send_or_raise(encode(WelcomeReply(tuple(self._facts[rank] for rank in range(self._size)))))

    def _take(self, peer: _GatewayPeer) -> bool:
        """Make this the client whose requests are served, unless another client is served. Return True if it is."""
        with self._changed:
            # The previous client may just have closed its connection.
            if self._client is peer or self._changed.wait_for(lambda: self._client is None, LINGER_SECONDS):
                self._client = peer
                log.info("serving the client %s", peer.name)
                return True
            name = self._client.name if self._client else ""
        peer.send(encode(BusyReply(name)))
        return False

    def _send_to_client(self, message: Message) -> None:
        client = self._client
        if client is not None:
            client.send(encode(message))

    def _end(self, reason: str) -> NoReturn:
        """End the group: wait for reports that are under way, then end this process and with it all connections."""
        with self._changed:
            first, self._ending = not self._ending, True
        if first:
            log.error("the group ends: %s", reason)
            self._listener.shutdown(socket.SHUT_RDWR)  # new callers must find the next group
            self._listener.close()
        time.sleep(LINGER_SECONDS)
        os._exit(1)


class _GatewayPeer:
    """An open connection and the name of its other end."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self.connection = connection
        self.name = name
        self._sending = threading.Lock()

    def frames(self) -> Iterator[RawFrame]:
        """Yield the frames that arrive until the connection is closed. Raise OSError or BadFrame."""
        cutter = FrameCutter()
        while data := self.connection.recv(1 << 20):
            yield from cutter.feed(data)

    def send(self, data: bytes) -> None:
        """Send data. Close the connection if it fails; its reading thread then finds it closed."""
        try:
            self.send_or_raise(data)
        except OSError:
            try:
                self.connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # closed already

    def send_or_raise(self, data: bytes) -> None:
        with self._sending:
            self.connection.sendall(data)


def _start(target: object, *arguments: object) -> None:
    name = getattr(target, "__name__", "gateway")
    threading.Thread(target=target, args=arguments, name=name, daemon=True).start()  # type: ignore[arg-type]
