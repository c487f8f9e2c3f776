"""The fork server: imports once what every worker needs, then forks a worker in a fraction of a second.

`python -m parallel_backend.worker.forkserver FD`, FD being its end of a socket pair (SEQPACKET) with the host. It ends
when the host's end closes, which the kernel does however the host ends, and its workers end with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import selectors
import shutil
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec
import torch

from ..comfyui_folder import ARGUMENTS, FOLDER
from ..models.comfyui.content.files import own_files
from ..models.comfyui.importing import import_comfyui
from ..wire.forking import Ended, Start, Started, log_path, receive_start
from .__main__ import main
from .process.environment import DEATH_PIPE

LEAVE_SECONDS = 5
PR_SET_PDEATHSIG = 1
GPU_FILES = ("/dev/nvidia", "/dev/dxg")
"""What a process that uses a GPU has open; the second under WSL2."""

MAYBE_GPU = (*GPU_FILES, "/dev/kfd")
"""What a machine has where ComfyUI may find a GPU; the last is AMD's."""


class ForkLoop:
    """The server's own loop. It does not touch a device, and no thread is started before the fork."""

    def __init__(self, host: socket.socket) -> None:
        self._host = host
        self._selector = selectors.DefaultSelector()
        self._selector.register(host, selectors.EVENT_READ)
        self._children: dict[int, tuple[int, int, int]] = {}  # pidfd -> pid, group, rank
        self._directories: dict[int, Path] = {}

    def serve(self) -> None:
        """Fork and reap until the host is gone, then see the workers off."""
        while self._turn(None):
            pass
        self._selector.unregister(self._host)
        until = time.monotonic() + LEAVE_SECONDS
        while self._children and time.monotonic() < until:
            self._turn(until - time.monotonic())
        for directory in self._directories.values():
            shutil.rmtree(directory, ignore_errors=True)

    def _turn(self, timeout: float | None) -> bool:
        """Handle what has happened; False once the host is gone."""
        for key, _ in self._selector.select(timeout):
            if key.fileobj is not self._host:
                self._reap(key.fd)
            elif not self._receive():
                return False
        return True

    def _receive(self) -> bool:
        received = receive_start(self._host)
        if received is None:
            return False
        start, death_pipe = received
        self._directories[start.group] = Path(start.directory)
        import_once(start.imports)
        for rank, variables in enumerate(start.variables):
            if _closed(death_pipe):  # the group was given up meanwhile
                self._report(Ended(start.group, rank, -signal.SIGKILL))
            else:
                self._fork(start, rank, start.environment | variables, death_pipe)
        os.close(death_pipe)
        return True

    def _fork(self, start: Start, rank: int, variables: Mapping[bytes, bytes], death_pipe: int) -> None:
        server = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads; OpenBLAS's survive it
            pid = os.fork()
        if pid == 0:
            self._become_worker(start, rank, {**variables, DEATH_PIPE.encode(): b"%d" % death_pipe}, server)
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = pid, start.group, rank
        self._selector.register(pidfd, selectors.EVENT_READ)
        self._report(Started(start.group, rank, pid), pidfd)

    def _become_worker(self, start: Start, rank: int, variables: Mapping[bytes, bytes], server: int) -> NoReturn:
        code = 1
        try:
            _end_with(server)
            os.setsid()
            _redirect(log_path(Path(start.directory), rank))
            Path("/proc/self/comm").write_text(f"parallel-rank{rank}")
            for fd in (self._host.fileno(), self._selector.fileno(), *self._children):
                os.close(fd)
            os.chdir(start.directory)
            if _device_touched() or _other_comfyui(variables):
                os.set_inheritable(int(variables[DEATH_PIPE.encode()]), True)
                os.execve(sys.executable, [sys.executable, "-m", "parallel_backend.worker"], dict(variables))
            os.environb.clear()
            os.environb.update(variables)
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
            code = main(())
        except BaseException:
            with contextlib.suppress(OSError):
                traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):  # the disk with the log may be full
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _reap(self, pidfd: int) -> None:
        pid, group, rank = self._children.pop(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        if not any(child_group == group for _, child_group, _ in self._children.values()):
            self._directories.pop(group, None)
        self._report(Ended(group, rank, os.waitstatus_to_exitcode(status)))

    def _report(self, message: Started | Ended, *fds: int) -> None:
        try:
            socket.send_fds(self._host, [msgspec.msgpack.encode(message)], fds)
        except OSError:
            pass  # the host is gone, which the next turn finds out


def _end_with(server: int) -> None:
    """Have the kernel kill this worker when its server ends, so that none outlives ComfyUI, not even a stopped one."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)


def _redirect(log: Path) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)


def _closed(pipe: int) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        return bool(selector.select(0))


def _device_touched() -> bool:
    """Whether an import has opened a GPU, which a forked process cannot use: the worker then starts from nothing."""
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith(GPU_FILES):
                return True
        except OSError:
            pass  # closed meanwhile: it was listdir's own
    return False


def import_once(modules: Sequence[str]) -> None:
    """Import modules for all workers that are forked from here on. One that fails does so in them again, and they can say so."""
    if missing := [module for module in modules if module not in sys.modules]:
        with _shared():
            for module in missing:
                with contextlib.suppress(Exception):
                    importlib.import_module(module)


def import_comfyui_early() -> None:
    """Import ComfyUI's models once for all workers, which otherwise takes each of them a second.

    Where there may be a GPU they are left to the workers: ComfyUI opens it, and a forked process could not use it. What
    goes wrong goes wrong in the workers again, and they can say so.
    """
    if any(f"/dev/{name}".startswith(MAYBE_GPU) for name in os.listdir("/dev")):
        return
    with contextlib.suppress(Exception):
        import_comfyui()
        importlib.import_module("comfy.model_detection")
        own_files(os.environ[FOLDER])  # as it was imported: the files may be others when a worker joins


@contextlib.contextmanager
def _shared() -> Iterator[None]:
    """What is imported in here stays shared with the workers; the garbage collector leaves it alone, here and in them."""
    gc.disable()  # it would look through what is imported again and again: a sixth of the time
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def _other_comfyui(variables: Mapping[bytes, bytes]) -> bool:
    """Whether ComfyUI was imported here from another folder, or with another command line, than a worker is to have it."""
    names = (FOLDER.encode(), ARGUMENTS.encode())
    return "comfy" in sys.modules and any(variables.get(name) != os.environb.get(name) for name in names)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with _shared():
        import_comfyui_early()
    sys.stdout.flush()
    ForkLoop(socket.socket(fileno=int(sys.argv[1]))).serve()
