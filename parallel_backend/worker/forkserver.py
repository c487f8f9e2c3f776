"""The fork server, which imports the workers' modules once and then forks each worker in a fraction of a second.

`python -m parallel_backend.worker.forkserver FD`, where FD is the server's end of a socket pair (SEQPACKET) with the host. The
server ends when the host's end closes, which the kernel does however the host ends. Its workers end with the server.
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
"""The prefixes of the device files that a process with a GPU has open. The second is for WSL2."""

MAYBE_GPU = (*GPU_FILES, "/dev/kfd")
"""The prefixes of the device files of a machine on which ComfyUI may find a GPU. The last is AMD's."""


class ForkLoop:
    """The server's loop. It uses no device, and starts no thread before a fork."""

    def __init__(self, host: socket.socket) -> None:
        self._host = host
        self._selector = selectors.DefaultSelector()
        self._selector.register(host, selectors.EVENT_READ)
        self._children: dict[int, tuple[int, int, int]] = {}  # pidfd -> pid, group, rank
        self._directories: dict[int, Path] = {}

    def serve(self) -> None:
        """Fork and reap workers until the host is gone, then wait for the workers to end and remove their folders."""
        while self._turn(None):
            pass
        self._selector.unregister(self._host)
        until = time.monotonic() + LEAVE_SECONDS
        while self._children and time.monotonic() < until:
            self._turn(until - time.monotonic())
        for directory in self._directories.values():
            shutil.rmtree(directory, ignore_errors=True)

    def _turn(self, timeout: float | None) -> bool:
        """Handle events. Return False if the host is gone."""
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
            if _closed(death_pipe):  # the host has given up this group meanwhile
                self._report(Ended(start.group, rank, -signal.SIGKILL))
            else:
                self._fork(start, rank, start.environment | variables, death_pipe)
        os.close(death_pipe)
        return True

    def _fork(self, start: Start, rank: int, variables: Mapping[bytes, bytes], death_pipe: int) -> None:
        server = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about threads at a fork: OpenBLAS's survive it
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
            pass  # the host is gone, and the next turn ends the loop


def _end_with(server: int) -> None:
    """Make the kernel kill this worker when the server ends, so that no worker outlives ComfyUI, even if it is stopped."""
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
    """Return True if an import has opened a GPU. A forked process cannot use it, so the worker starts Python anew."""
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith(GPU_FILES):
                return True
        except OSError:
            pass  # closed meanwhile: the descriptor of listdir itself
    return False


def import_once(modules: Sequence[str]) -> None:
    """Import modules for all workers that are forked later. Errors are ignored: a worker meets them again and reports them."""
    if missing := [module for module in modules if module not in sys.modules]:
        with _shared():
            for module in missing:
                with contextlib.suppress(Exception):
                    importlib.import_module(module)


def import_comfyui_early() -> None:
    """Import ComfyUI's models once for all workers, which saves each of them a second.

    If there may be a GPU, the workers import the models themselves: ComfyUI opens the GPU, and a forked process could not use
    it. Errors are ignored: a worker meets them again and reports them.
    """
    if any(f"/dev/{name}".startswith(MAYBE_GPU) for name in os.listdir("/dev")):
        return
    with contextlib.suppress(Exception):
        import_comfyui()
        importlib.import_module("comfy.model_detection")
        own_files(os.environ[FOLDER])  # digests of the imported files, which may change before a worker joins


@contextlib.contextmanager
def _shared() -> Iterator[None]:
    """Keep the memory of imports in this context shared with the workers: the garbage collector never touches it again."""
    gc.disable()  # repeated collections would take a sixth of the time of the imports
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def _other_comfyui(variables: Mapping[bytes, bytes]) -> bool:
    """Return True if the server imported ComfyUI from another folder or with another command line than a worker needs."""
    names = (FOLDER.encode(), ARGUMENTS.encode())
    return "comfy" in sys.modules and any(variables.get(name) != os.environb.get(name) for name in names)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with _shared():
        import_comfyui_early()
    sys.stdout.flush()
    ForkLoop(socket.socket(fileno=int(sys.argv[1]))).serve()
