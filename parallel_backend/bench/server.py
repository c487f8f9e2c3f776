"""A ComfyUI in a process of its own: its start and stop, its log and its processes."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import requests
from typing_extensions import Self

from ..errors import Cancelled
from .cards import PACK
from .client import Client, ComfyUIError, Graph, QueuedRun

_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10_000
_USUAL = 32_768
"""First port that Linux gives to connections by default."""


class Server(Client):
    """A ComfyUI server in a process of its own, for use in a `with` statement.

    Args:
        base_dir: a folder with models, input and custom_nodes. ComfyUI writes its files there.
        env: variables that are added to this process's environment for the server.
        python: the interpreter of the server.
        patience: seconds that the server may take to start.
    """

    def __init__(
        self,
        comfyui: Path | str,
        base_dir: Path | str,
        *,
        args: Sequence[str] = ("--cpu",),
        env: Mapping[str, str] | None = None,
        python: Path | str = sys.executable,
        patience: float = 180,
    ) -> None:
        super().__init__()
        self.comfyui = Path(comfyui).absolute()
        self.base_dir = Path(base_dir).absolute()
        self.input_dir = self.base_dir / "input"
        self.output_dir = self.base_dir / "output"
        self.log_path = self.base_dir / "comfyui.log"
        self.args = tuple(args)
        self.env = dict(env or {})
        self.python = str(python)
        self.patience = patience
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """Return the server's process."""
        assert self._process is not None, "ComfyUI has not been started"
        return self._process

    @property
    def log(self) -> str:
        """Return all that this server has written so far."""
        return self.log_path.read_text(errors="replace")

    def start(self) -> None:
        """Start the server and wait until it answers and its events arrive."""
        assert self._process is None, "ComfyUI is running already"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [
            *(self.python, str(self.comfyui / "main.py")),
            *("--listen", "127.0.0.1", "--port", str(port), "--disable-auto-launch", "--disable-api-nodes"),
            *("--base-directory", str(self.base_dir), "--database-url", "sqlite:///:memory:"),
            *("--preview-method", "latent2rgb", *self.args),
        ]
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self.base_dir,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only this process, and stop() then ends ComfyUI in good order
            )
        try:
            self._wait_until_ready(time.monotonic() + self.patience)
            self._listen(self.patience)
        except BaseException:
            self.stop()
            raise

    def _wait_until_ready(self, deadline: float) -> None:
        while True:
            if self.process.poll() is not None:
                raise ComfyUIError(self._with_log(f"ComfyUI ended with code {self.process.returncode} while starting"))
            try:
                return self._http.get(f"{self.url}/system_stats", timeout=5).raise_for_status()
            except requests.RequestException:
                if time.monotonic() > deadline:
                    raise ComfyUIError(self._with_log("ComfyUI did not start in time")) from None
                time.sleep(0.1)

    def stop(self, timeout: float = 15) -> None:
        """End the server as Ctrl-C does, terminate it if it does not end, and kill the rest of its process group."""
        if self._process is None:
            return
        # a process started in a shell's background ignores SIGINT, and so do its children
        interruptible = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
        try:
            for number in (signal.SIGINT, signal.SIGTERM) if interruptible else (signal.SIGTERM,):
                self._process.send_signal(number)
                try:
                    self._process.wait(timeout)
                    break
                except subprocess.TimeoutExpired:
                    pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
            self._listen_no_more()

    def children(self) -> list[psutil.Process]:
        """Return the live processes that descend from the server."""
        try:
            children: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return children

    def _with_log(self, message: str, lines: int = 30) -> str:
        tail = "\n".join(self.log.splitlines()[-lines:])
        return f"{message}. The log {self.log_path} ends with:\n{tail}"

    def folder(self, kind: str) -> Path:
        """Return the path of this ComfyUI's folder `output` or `temp`."""
        return self.base_dir / kind


def free_port() -> int:
    """Return a free port of this machine that the system gives to no connection before a server opens it."""
    try:
        highest = int(_CONNECTIONS.read_text().split()[0])
    except OSError:
        highest = _USUAL
    while True:
        port = random.SystemRandom().randrange(_LOWEST, highest if highest > _LOWEST else _USUAL)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


GRAPH = PACK / "scripts" / "sprites_api.json"
"""The demo's graph, of a small model that this pack brings along."""


def make_base(base: Path, comfyui: Path, files: Sequence[tuple[str, Path]]) -> None:
    """Make a base directory for ComfyUIs in an empty folder: models and packs of another ComfyUI, and this pack.

    Args:
        files: folder and path of each file to copy. If there are any, they are all models and inputs.
    """
    for folder, file in files:
        (base / folder).mkdir(parents=True, exist_ok=True)
        shutil.copy(file, base / folder)
    if not files:
        (base / "models").symlink_to(comfyui / "models", target_is_directory=True)
    packs = base / "custom_nodes"
    packs.mkdir()
    for pack in (comfyui / "custom_nodes").glob("*"):
        (packs / pack.name).symlink_to(pack.resolve())
    if PACK not in (pack.resolve() for pack in packs.iterdir()):
        (packs / "ComfyUI-Parallel").symlink_to(PACK, target_is_directory=True)


ANSWER = 30.0
"""Seconds in which the server's events have to begin."""


class Running(Client):
    """A client that queues jobs in the user's ComfyUI, for use in a `with` statement.

    At the end it removes its jobs from the history. A job of the user's ends the benchmark.

    Args:
        url: address of the ComfyUI.
        output: output folder of the ComfyUI.
    """

    def __init__(self, url: str, output: Path) -> None:
        super().__init__()
        self.url = url
        self._output = output
        self._done: list[str] = []
        self._gone: set[str] = set()

    def __enter__(self) -> Self:
        self._listen(ANSWER)
        return self

    def __exit__(self, *_: object) -> None:
        self._listen_no_more()
        self._post("/history", {"delete": self._done})

    def folder(self, kind: str) -> Path:
        """Return the output folder of the ComfyUI, where jobs save latents."""
        assert kind == "output"
        return self._output

    def _submit(self, graph: Graph) -> QueuedRun:
        """Queue a graph. Raises Cancelled if another job runs or waits."""
        if self.queued():
            raise Cancelled("a run was queued.")
        run = super()._submit(graph)
        self._done.append(run.prompt_id)
        return run

    def _was_removed(self, prompt_id: str) -> bool:
        """Return True if the graph was already gone at the last look.

        At the first look without the graph, its last events may still be on their way.
        """
        gone = prompt_id in self._gone
        if prompt_id not in self.queued():
            self._gone.add(prompt_id)
        return gone

    def queued(self) -> set[str]:
        """Return the ids of all jobs that run or wait."""
        return {job[1] for jobs in self.get("/queue").values() for job in jobs}
