"""A live listener closes the connections of strangers and faulty clients, and serves the next client."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from parallel_backend.host.workers.remote import ask
from parallel_backend.wire.address import Address
from parallel_backend.wire.frames import MAGIC, BadFrame, encode, host_decoder, worker_decoder
from parallel_backend.wire.handshake import (
    ANSWER,
    CLIENT,
    GREETING,
    RESULT,
    VARIABLE,
    Crowded,
    HandshakeVerdict,
    present,
)
from parallel_backend.wire.message import PROTOCOL
from parallel_backend.wire.to_host import ConnectReply, JoinReply, RankFacts, WelcomeReply
from parallel_backend.wire.to_worker import CancelRequest, JoinRequest
from parallel_backend.worker.process.gateway import STRANGERS
from scripts.comfyui import free_port
from tests.wire.messages import SAMPLE, TENSORS, mutated

REPO = Path(__file__).parents[2]
MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Listener:
    """A group of one rank on the loopback interface."""

    address: Address
    secret: bytes
    process: psutil.Process

    def connect(self) -> socket.socket:
        return socket.create_connection((self.address.host, self.address.port), timeout=20)

    def client(self) -> socket.socket:
        """Return a connection that has proved the secret and received its WelcomeReply."""
        connection = self.connect()
        present(connection, self.secret, CLIENT)
        connection.settimeout(20)
        assert isinstance(receive(connection), WelcomeReply)
        return connection

    def assert_serves(self) -> None:
        with self.client() as connection:
            number = secrets.randbits(60)
            connection.sendall(encode(JoinRequest(number)))
            assert receive(connection, JoinReply) == JoinReply(number)


def receive(connection: socket.socket, kind: type = object) -> object:
    """Return the next message of a kind."""
    decoder = host_decoder()
    while data := connection.recv(1 << 16):
        for frame in decoder.feed(data):
            if isinstance(frame.message, kind):
                return frame.message
    raise AssertionError("the connection was closed")


def closed(connection: socket.socket) -> bool:
    """Return True once the other side closes, after any number of bytes."""
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while connection.recv(1 << 16):
            pass
    return True


@pytest.fixture(scope="module")
def listener(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listener]:
    folder = tmp_path_factory.mktemp("gateway")
    secret = folder / "secret"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(16))
    port, store = free_port(), free_port()
    variables = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store),
        "PARALLEL_LISTEN": f"127.0.0.1:{port}",
        "PARALLEL_DEVICE": "cpu",
        VARIABLE: str(secret),
    }
    command = [sys.executable, "-m", "parallel_backend.worker"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env={**os.environ, **variables}, cwd=REPO, stdout=log, stderr=log)
    try:
        address = Address("127.0.0.1", port)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(VARIABLE, str(secret))
            ask(address, 120)
        listener = Listener(address, secret.read_bytes(), psutil.Process(process.pid))
        listener.assert_serves()
        yield listener
        assert process.poll() is None, (folder / "log").read_text()
    finally:
        process.kill()
        process.wait()


def resources(listener: Listener) -> tuple[int, int, int]:
    """Return bytes of memory, and numbers of threads and open files."""
    process = listener.process
    return process.memory_info().rss, process.num_threads(), process.num_fds()


@pytest.fixture
def threads(listener: Listener) -> Iterator[int]:
    """Provide the listener's number of threads. After the test it has to serve, with as much memory and as many files open."""
    listener.assert_serves()
    memory_before, threads_before, files_before = resources(listener)
    yield threads_before
    listener.assert_serves()
    until = time.monotonic() + 15  # a thread may still be in its handshake
    while True:
        memory, threads, files = resources(listener)
        if threads <= threads_before + 2 and files <= files_before + 2:
            break
        assert time.monotonic() < until, (threads_before, files_before, memory, threads, files)
        time.sleep(0.1)
    assert memory - memory_before <= 32 * MEBIBYTE


def test_the_listener_has_only_the_given_address(listener: Listener) -> None:
    ours = [c.laddr for c in listener.process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert {address.ip for address in ours if address.port == listener.address.port} == {"127.0.0.1"}


@pytest.mark.usefixtures("threads")
def test_mutated_frames_of_a_client_end_only_its_connection(listener: Listener) -> None:
    draw = random.Random(1)
    frames = [
        encode(SAMPLE, TENSORS),
        encode(JoinRequest(1)),
        encode(CancelRequest(3)),
        encode(ConnectReply(1, RankFacts("h", "cpu", "", "", ""))),
    ]
    sent = 0
    while sent < 1000:
        data = mutated(draw.choice(frames), draw)
        if not refused(data):
            continue  # a valid frame, or one that waits for more bytes
        with listener.client() as connection:
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                connection.sendall(data)
            assert closed(connection)
        sent += 1


def refused(data: bytes) -> bool:
    try:
        worker_decoder().feed(data)
    except BadFrame:
        return True
    return False


@pytest.mark.usefixtures("threads")
def test_mutated_handshakes_end_only_their_connection(listener: Listener) -> None:
    draw = random.Random(2)
    good = ANSWER.pack(MAGIC, PROTOCOL, CLIENT, bytes(32), bytes(32))
    for case in range(300):
        data = mutated(good, draw) if case % 2 else draw.randbytes(draw.randint(0, 4096))
        with listener.connect() as connection:
            with contextlib.suppress(OSError):  # the listener may have closed the connection already
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
            assert closed(connection)


def test_a_proof_of_the_secret_cannot_be_replayed(listener: Listener) -> None:
    """The test repeats a client's answer on a second connection, for which the listener has drawn another number."""
    ours, theirs = socket.socketpair()
    with ours, theirs, listener.connect() as first, ThreadPoolExecutor() as pool:
        theirs.sendall(first.recv(GREETING.size, socket.MSG_WAITALL))
        client = pool.submit(present, ours, listener.secret, CLIENT)
        said = theirs.recv(ANSWER.size, socket.MSG_WAITALL)
        first.sendall(said)
        theirs.sendall(first.recv(RESULT.size, socket.MSG_WAITALL))
        with pytest.raises(OSError, match="Operation not supported"):  # admitted; a socket pair has no TCP options
            client.result()
    with listener.connect() as second:
        second.recv(GREETING.size, socket.MSG_WAITALL)
        second.sendall(said)
        assert second.recv(RESULT.size, socket.MSG_WAITALL)[0] == HandshakeVerdict.WRONG_SECRET


def test_silent_strangers_take_few_resources_and_keep_no_client_out(listener: Listener, threads: int) -> None:
    """More connections than allowed are opened. The oldest ones are told why they are closed, and a client is
    served at once.
    """
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(listener.connect()) for _ in range(STRANGERS + 3)]
        started = time.monotonic()
        listener.assert_serves()
        assert time.monotonic() - started < 5
        assert listener.process.num_threads() <= threads + 40
        for oldest in silent[:3]:
            with pytest.raises(Crowded, match="have not shown the secret, and closed this one"):
                present(oldest, listener.secret, CLIENT)
        assert present(silent[-1], listener.secret, CLIENT)


def test_strangers_that_reconnect_repeatedly_keep_no_client_out(listener: Listener) -> None:
    over = threading.Event()

    def come_again() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), listener.connect() as connection:
                connection.settimeout(0.1)
                while not over.is_set():
                    with contextlib.suppress(TimeoutError):
                        if not connection.recv(1 << 10):
                            break

    with ThreadPoolExecutor(48) as pool:
        for _ in range(48):
            pool.submit(come_again)
        try:
            for _ in range(3):
                time.sleep(0.3)
                started = time.monotonic()
                listener.assert_serves()
                assert time.monotonic() - started < 5
        finally:
            over.set()
