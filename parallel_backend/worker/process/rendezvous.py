"""Connection of a worker to the host and to the other ranks, for workers that ComfyUI starts and those of torchrun."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import psutil
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from ...clock import AwakeClock
from ...mesh import NO_TIMEOUT
from ...temporary import path_of
from ...wire.address import GLOO, NCCL, check_interfaces
from ...wire.handshake import HandshakeFailed, present
from .environment import Environment, LaunchedWorker, ListeningWorker
from .gateway import LINGER_SECONDS, Gateway

FIND_SECONDS = 300.0
"""Seconds for which a rank tries to connect to rank 0's gateway."""

LONGEST_TRY = 20.0
"""Seconds that one try takes at most. A longer time means that this process was paused, and counts as this many."""

ANY_INTERFACE = ("0.0.0.0", "::")


@dataclass(frozen=True)
class Rendezvous:
    """A rank's connection to ComfyUI, and the store through which it finds the other ranks.

    Attributes:
        connection: a socket to ComfyUI, or to the gateway.
        generation: the number of the group of workers.
        store: opens the store in which the ranks find each other. Raises OSError if it cannot be opened.
        leave: ends the process when the host is gone.
        linger: the seconds that the process stays after a failure.
    """

    connection: socket.socket
    generation: int
    store: Callable[[], Store]
    leave: Callable[[], NoReturn]
    linger: float


def connect_to_host(environment: Environment) -> Rendezvous:
    """Connect this rank to ComfyUI, or to rank 0's gateway.

    Raises:
        OSError: ComfyUI or rank 0 cannot be reached, or rank 0 cannot listen.
        Refused: the environment names a network interface that does not exist.
    """
    if isinstance(environment.host, LaunchedWorker):
        return _to_parent(environment.host, environment.world_size)
    return _to_gateway(environment.host, environment)


def _to_parent(launched: LaunchedWorker, world_size: int) -> Rendezvous:
    def leave() -> NoReturn:
        shutil.rmtree(launched.run_directory, ignore_errors=True)  # the host is gone and cannot do this
        os._exit(0)

    def watch_host() -> None:
        """Block until the host's end of the pipe closes, and leave. The kernel closes it however the host ends."""
        os.read(launched.death_pipe, 1)
        leave()

    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(launched.socket)
    except OSError as error:
        raise OSError(error.errno, error.strerror, launched.socket) from None  # connect() does not name the path
    threading.Thread(target=watch_host, name="watch_host", daemon=True).start()

    def store() -> Store:
        # FileStore opens its path for each operation. Without the folder it would retry the first for minutes, in which no
        # thread of Python runs. The path of an open file stays.
        file = os.open(launched.rendezvous, os.O_RDWR | os.O_CREAT, 0o600)
        return FileStore(str(path_of(file)), world_size)

    return Rendezvous(connection, launched.generation, store, leave, linger=0)


def _to_gateway(listening: ListeningWorker, environment: Environment) -> Rendezvous:
    def leave() -> NoReturn:
        print(
            "The group of workers has ended; torchrun restarts it if --max-restarts allows it.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    check_interfaces(os.environ, nccl=environment.device.type == "cuda")
    rank = environment.rank
    if rank == 0:
        generation = secrets.randbits(63)
        connection = Gateway(listening, environment.world_size, generation).own_connection()
        interface = listening.address.host
    else:
        connection, generation = _find(listening, rank)
        interface = connection.getsockname()[0]
    _use_interface(interface)

    def store() -> Store:
        host, port = listening.store
        shared = TCPStore(host, port, is_master=listening.own_store and rank == 0, timeout=NO_TIMEOUT)
        return PrefixStore(str(generation), shared)  # restarts share torchrun's store; the prefix separates them

    return Rendezvous(connection, generation, store, leave, LINGER_SECONDS)


def _find(listening: ListeningWorker, rank: int) -> tuple[socket.socket, int]:
    host = listening.store[0] if listening.address.host in ANY_INTERFACE else listening.address.host
    clock = AwakeClock(LONGEST_TRY)
    until = clock.now() + FIND_SECONDS
    while True:
        try:
            connection = socket.create_connection((host, listening.address.port), timeout=5)
            return connection, present(connection, listening.secret, rank)
        except HandshakeFailed as error:
            raise ConnectionError(f"rank 0 at {listening.address} refused rank {rank}: {error}") from None
        except OSError as error:  # rank 0 has not started yet, or is ending
            if clock.now() > until:
                raise ConnectionError(f"rank 0 was not found at {listening.address}: {error}") from None
        time.sleep(0.2)


def _use_interface(address: str) -> None:
    """Make gloo and NCCL use the interface with this address, unless the environment names another one.

    By default they would resolve the machine's own name, which often leads to the loopback interface.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            for variable in (GLOO, NCCL):
                os.environ.setdefault(variable, name)
