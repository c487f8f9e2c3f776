"""The host's end of the fork server, and the worker processes that the server forks."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

from ...clock import AwakeClock
from ...errors import WorkerFailed
from ...wire.forking import MAX_PACKET_BYTES, Ended, Start, Started, send_start

POLL_SECONDS = 0.05
REAP_SECONDS = 1


class ForkServerStuck(WorkerFailed):
    """The error of a fork server that has stopped, or hangs, and forks no worker."""


class WorkerProcess:
    """A worker process with the interface of subprocess.Popen. `pid` is None until the worker is forked."""

    def __init__(self, server: ForkServer) -> None:
        self.pid: int | None = None
        self.returncode: int | None = None
        self._server = server
        self._pidfd: int | None = None
        self._killed = False

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs. Raises OSError if no file number was left to watch it by."""
        self._server.update()
        if self.returncode is None and self.pid is not None and self._pidfd is None and not self._killed:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if self.returncode is None and self._pidfd is not None and _readable(self._pidfd, 0):
            self._server.wait(REAP_SECONDS)  # the process has just ended: the server is about to report the code
            self._server.update()
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for the process to end, and return its exit code. Raises subprocess.TimeoutExpired."""
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() >= until:
                raise subprocess.TimeoutExpired("parallel_backend.worker", timeout)
            self._server.wait(min(POLL_SECONDS, max(0.0, until - time.monotonic())))
        return code

    def kill(self) -> None:
        """Kill the process.

        Once the group's death pipe is closed, a process that cannot be watched ends, and a process that is not forked yet never
        is.
        """
        self._killed = True
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def started(self, pid: int, pidfd: int | None) -> None:
        """Record that the server has forked the process. Without `pidfd`, no file number was left for it."""
        self.pid, self._pidfd = pid, pidfd
        if self._killed:
            self.kill()

    def ended(self, code: int) -> None:
        """Record that the process is gone."""
        self.returncode = code
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


class ForkServer:
    """A process that forks workers. It stays, so that later workers start at once. One thread at a time may use it.

    It starts with the first workers, or before.

    Raises:
        OSError: the fork server could not be started.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._processes: dict[tuple[int, int], WorkerProcess] = {}
        self._clock = AwakeClock()
        self._signs: tuple[float, ...] = ()
        self._alive_at = 0.0
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the server)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "parallel_backend.worker.forkserver", str(theirs.fileno())],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                cwd="/",  # Python imports from where it is started, and ComfyUI's folder has modules of its own
                start_new_session=True,
            )

    def alive(self) -> bool:
        """Return True if the server can fork."""
        return self._server.poll() is None

    def start(
        self,
        group: int,
        directory: Path,
        environment: Mapping[str, str],
        variables: Sequence[Mapping[str, str]],
        imports: Sequence[str],
        death_pipe: int,
    ) -> list[WorkerProcess]:
        """Fork a worker for each of `variables`, once the server has imported the modules. Raises OSError."""
        self._alive_at = self._clock.now()
        processes = [WorkerProcess(self) for _ in variables]
        in_bytes = [_in_bytes(own) for own in variables]
        start = Start(group, str(directory), _in_bytes(environment), in_bytes, list(imports))
        send_start(self._socket, start, death_pipe)
        self._processes |= {(group, rank): process for rank, process in enumerate(processes)}
        return processes

    def waited_for(self) -> bool:
        """Return True if a requested worker is neither forked nor given up."""
        return any(process.pid is None for process in self._processes.values())

    def check_forking(self, seconds: float) -> None:
        """Raise ForkServerStuck if a requested worker is not forked and the server was inactive for `seconds`.

        A server that imports modules is active; imports may take a minute. Call this several times a second.
        """
        now, signs = self._clock.now(), self._signs_of_life()
        if signs != self._signs or not self.waited_for():
            self._signs, self._alive_at = signs, now
        if now - self._alive_at > seconds:
            raise ForkServerStuck(
                f"The process that starts the workers was stuck for {seconds:.0f} s, and so was its replacement: "
                "check what stops processes on this machine, then queue the prompt again."
            )

    def _signs_of_life(self) -> tuple[float, ...]:
        """Return the fork server's CPU times and context switches; they stay equal only while the server is inactive.

        CPU time alone is too coarse: a server that imports from a slow disk may use less than one clock tick in seconds.
        """
        try:
            server = psutil.Process(self._server.pid)
            return (*server.cpu_times(), *server.num_ctx_switches())
        except psutil.Error:
            return ()

    def update(self) -> None:
        """Record the events that the server has reported of the workers."""
        while self.wait(0):
            try:
                data, fds, _, _ = socket.recv_fds(self._socket, MAX_PACKET_BYTES, 1)
            except OSError:
                data, fds = b"", []
            if not data:
                self._lost()
                return
            message = msgspec.msgpack.decode(data, type=Started | Ended)
            process = self._processes[message.group, message.rank]
            if isinstance(message, Started):
                process.started(
                    message.pid, fds[0] if fds else None
                )  # the kernel drops the descriptor if this process has no file number left
            else:
                del self._processes[message.group, message.rank]
                process.ended(message.code)

    def wait(self, timeout: float) -> bool:
        """Return True if there is an event to record. Wait at most `timeout` seconds for it."""
        return self._socket.fileno() >= 0 and _readable(self._socket.fileno(), timeout)

    def log_tail(self, lines: int) -> str:
        """Return the last lines that the server printed, which name the modules that could not be imported."""
        size = os.fstat(self._log.fileno()).st_size
        text = os.pread(self._log.fileno(), size, 0).decode(errors="replace")
        return "\n".join(text.strip().splitlines()[-lines:])

    def close(self, grace: float) -> None:
        """End the server. Remaining workers end with it."""
        self._socket.close()
        try:
            self._server.wait(grace)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._lost()
        self._log.close()

    def _lost(self) -> None:
        """Record that the server and all its workers have ended: the kernel kills the workers with the server."""
        self._socket.close()
        self._server.kill()
        code = self._server.wait()
        for process in self._processes.values():
            if process.returncode is None:
                process.ended(code if process.pid is None else -signal.SIGKILL)
        self._processes.clear()


def _in_bytes(environment: Mapping[str, str]) -> dict[bytes, bytes]:
    return {os.fsencode(name): os.fsencode(value) for name, value in environment.items()}


def _readable(fd: int, timeout: float) -> bool:
    poll = select.poll()  # select() cannot watch the high file numbers of a busy ComfyUI
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout * 1000))
