"""Rank 0's listener: one open port through which ComfyUI and the other ranks' messages come and go.

Each rank keeps one connection to the gateway as long as it lives; ComfyUI makes one and leaves. Frames of all ranks go
to the client that has joined, and its frames go to rank 0. Nothing is decoded before the caller has shown that it holds
the secret. When a rank is lost so is the group: this process ends, all others find their connections closed and end too,
and torchrun starts them anew. A client that leaves, or that sends what is no frame, only loses its own connection.
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
"""Connections that may be in their handshake at a time; for one more the oldest is closed. Whoever holds the secret shows it
at once, and has left this crowd before it is the oldest."""

SEND_SECONDS = 60
"""A client that does not read for so long is given up."""

LINGER_SECONDS = 2.0
"""How long a failed group lives on, so that the reports of all its ranks reach the client."""


class Gateway:
    """Listens from its construction on; ends this process when the group is over.

    Args:
        settings: where to listen, and the secret.
        ranks: the world size.
        generation: a number that this start of the group has alone.

    Raises:
        OSError: the address is not this machine's, or the port is taken.
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
        """Callers in their handshake by file number, the oldest first; of the accepting thread alone."""
        address = settings.address
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self._listener = socket.create_server((address.host, address.port), family=family)
        _start(self._accept)

    def own_connection(self) -> socket.socket:
        """Rank 0's connection, inside this process."""
        ours, theirs = socket.socketpair()
        peer = _GatewayPeer(ours, "this machine")
        self._ranks[0] = peer
        _start(self._serve_rank, peer, 0)
        return theirs

    def _accept(self) -> None:
        """Accept callers and see them through their handshakes; one thread for all, so that silent ones cost little."""
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
        except OSError:  # closed by the end of the group, or out of file numbers
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
        """Turn the oldest stranger away."""
        for fd, (_, stranger) in self._strangers.items():
            with contextlib.suppress(OSError):
                stranger.tell(HandshakeVerdict.CROWDED)
            crowd = f"{len(self._strangers)} connections show no secret, and this is the oldest"
            self._turn_away(selector, fd, ConnectionError(crowd))
            return

    def _hear(self, selector: selectors.BaseSelector, fd: int) -> None:
        """Read what a stranger says; start to serve the one that has shown the secret."""
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
        if came_twice:  # it was started anew and the connection of the one before is not known to be dead yet
            self._end(f"rank {role} came a second time, from {peer.name}")
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
        reason = "it has left"
        try:
            self._welcome(peer)
            for frame in peer.frames():
                message = decoder.decode(frame).message
                if isinstance(message, ShutdownRequest):
                    self._end(f"the client {peer.name} has given the group up")
                if isinstance(message, AbandonRequest) or (
                    self._client is not peer and not isinstance(message, JoinRequest)
                ):
                    raise BadFrame(f"{type(message).__name__} out of place")
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
        """Wait with the client until all ranks are there, then tell it who they are."""
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
        """Make this the client whose requests are served, unless there is another one."""
        with self._changed:
            # the one before may have closed its connection this moment
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
        """The group is over: linger for reports under way, then end this process, and with it all connections."""
        with self._changed:
            first, self._ending = not self._ending, True
        if first:
            log.error("the group ends: %s", reason)
            self._listener.shutdown(socket.SHUT_RDWR)  # who comes now is to find the next group
            self._listener.close()
        time.sleep(LINGER_SECONDS)
        os._exit(1)


class _GatewayPeer:
    """An open connection and who is at its other end."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self.connection = connection
        self.name = name
        self._sending = threading.Lock()

    def frames(self) -> Iterator[RawFrame]:
        """What arrives, until the connection is closed. Raises OSError and BadFrame."""
        cutter = FrameCutter()
        while data := self.connection.recv(1 << 20):
            yield from cutter.feed(data)

    def send(self, data: bytes) -> None:
        """Send; a connection that cannot take it any more is closed, which its reading thread finds out."""
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
