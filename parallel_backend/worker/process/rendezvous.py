"""How a worker comes to its connections: as a child of ComfyUI, or as one of torchrun's on any machine."""

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
from ...wire.address import GLOO, NCCL, check_interfaces
from ...wire.handshake import HandshakeFailed, present
from .environment import Environment, LaunchedWorker, ListeningWorker
from .gateway import LINGER_SECONDS, Gateway

FIND_SECONDS = 300.0
"""How long a rank looks for rank 0's gateway."""

LONGEST_TRY = 20.0
"""Seconds that one look takes at most; more is a pause of this process."""

ANY_INTERFACE = ("0.0.0.0", "::")


@dataclass(frozen=True)
class Rendezvous:
    """A rank's connection to ComfyUI and its way to the other ranks.

    `leave` ends the process because there is nobody left to work for; `linger` is how long it stays after a failure.
    """

    connection: socket.socket
    generation: int
    store: Callable[[], Store]
    leave: Callable[[], NoReturn]
    linger: float


def connect_to_host(environment: Environment) -> Rendezvous:
    """Connect.

    Raises:
        OSError: ComfyUI or rank 0 cannot be reached, or rank 0 cannot listen.
        Refused: the environment names a network interface that is not there.
    """
    if isinstance(environment.host, LaunchedWorker):
        return _to_parent(environment.host, environment.world_size)
    return _to_gateway(environment.host, environment)


def _to_parent(launched: LaunchedWorker, world_size: int) -> Rendezvous:
    def leave() -> NoReturn:
        shutil.rmtree(launched.run_directory, ignore_errors=True)  # for a host that no longer can
        os._exit(0)

    def watch_host() -> None:
        """Block until the host's end of the pipe closes, which the kernel does however the host ends."""
        os.read(launched.death_pipe, 1)
        leave()

    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(launched.socket)
    except OSError as error:
        raise OSError(error.errno, error.strerror, launched.socket) from None  # connect() does not name it
    threading.Thread(target=watch_host, name="watch_host", daemon=True).start()
    return Rendezvous(
        connection, launched.generation, lambda: FileStore(launched.rendezvous, world_size), leave, linger=0
    )


def _to_gateway(listening: ListeningWorker, environment: Environment) -> Rendezvous:
    def leave() -> NoReturn:
        print("The group is over; torchrun starts it anew if it was told to.", file=sys.stderr, flush=True)
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
        return PrefixStore(str(generation), shared)  # restarts share torchrun's store and must not meet in it

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
            raise ConnectionError(f"rank 0 at {listening.address} does not take rank {rank}: {error}") from None
        except OSError as error:  # not up yet, or on its way down
            if clock.now() > until:
                raise ConnectionError(f"rank 0 was not found at {listening.address}: {error}") from None
        time.sleep(0.2)


def _use_interface(address: str) -> None:
    """Have gloo and NCCL use the interface with this address, unless told otherwise: a host's own name often leads to
    the loopback interface, where no other machine is found."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            for variable in (GLOO, NCCL):
                os.environ.setdefault(variable, name)
