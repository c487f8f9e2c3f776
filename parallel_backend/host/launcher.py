"""Starting the worker processes of one generation."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..worker import environment as names

PACK_ROOT = Path(__file__).resolve().parents[2]
ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""ComfyUI may choose cudaMallocAsync for its own process; NCCL's buffers do not go with it."""


@dataclass
class Launched:
    """The processes of one generation and what they share with us."""

    directory: Path
    processes: list[subprocess.Popen[bytes]]
    death_pipe: int

    def log_tail(self, rank: int, lines: int = 12) -> str:
        """The last lines a worker printed."""
        try:
            text = self._log(self.directory, rank).read_text(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.strip().splitlines()[-lines:])

    def end(self, grace: float) -> None:
        """Give the processes `grace` seconds to leave, kill those that stay, and remove every trace."""
        for process in self.processes:
            try:
                process.wait(grace)
            except subprocess.TimeoutExpired:
                grace = 0
        os.close(self.death_pipe)
        for process in self.processes:
            process.kill()
            process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    @staticmethod
    def _log(directory: Path, rank: int) -> Path:
        return directory / f"rank{rank}.log"


def make_directory() -> Path:
    """A directory of the user's alone (mode 0700) for one generation's socket, rendezvous and logs."""
    return Path(tempfile.mkdtemp(prefix="comfyui-parallel-"))


def socket_path(directory: Path) -> Path:
    """Where a generation's workers find the host."""
    return directory / "socket"


def launch(directory: Path, devices: tuple[str, ...], transport: str, generation: int) -> Launched:
    """Start one process a device. They end when the returned death pipe closes, however our process ends."""
    death_read, death_write = os.pipe()
    processes: list[subprocess.Popen[bytes]] = []
    launched = Launched(directory, processes, death_write)
    try:
        for rank, device in enumerate(devices):
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(len(devices)),
                names.DEVICE: device,
                names.TRANSPORT: transport,
                names.RENDEZVOUS: f"file://{directory / 'rendezvous'}",
                names.SOCKET: str(socket_path(directory)),
                names.GENERATION: str(generation),
                names.DEATH_PIPE: str(death_read),
                names.RUN_DIRECTORY: str(directory),
            }
            with Launched._log(directory, rank).open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "parallel_backend.worker"],
                        env=_environment(len(devices)) | variables,
                        cwd=directory,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        pass_fds=(death_read,),
                        start_new_session=True,
                    )
                )
    except OSError:
        launched.end(grace=0)
        raise
    finally:
        os.close(death_read)
    return launched


def _environment(workers: int) -> dict[str, str]:
    """Ours, with the pack importable, one share of the cores a worker, and sockets on the loopback interface."""
    inherited = {name: value for name, value in os.environ.items() if name not in ALLOCATOR_SETTINGS}
    paths = [str(PACK_ROOT), *filter(None, [inherited.get("PYTHONPATH")])]
    defaults = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // workers)),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    return defaults | inherited | {"PYTHONPATH": os.pathsep.join(paths)}
