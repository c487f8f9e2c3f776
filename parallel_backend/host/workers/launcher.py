"""Starting the worker processes of one generation."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...cache import cache_folder
from ...comfyui_folder import ARGUMENTS, FOLDER
from ...plan import ResolvedPlan
from ...temporary import PREFIX, OwnedFolder, sweep
from ...wire.address import GLOO, NCCL, check_interfaces
from ...wire.forking import log_path
from ...wire.handshake import VARIABLE as SECRET_FILE
from ...worker.process import environment as names
from .processes import ForkServer, WorkerProcess

PACK_ROOT = Path(__file__).resolve().parents[3]
ALLOCATOR_SETTINGS = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}
"""Where the user, or ComfyUI for its own process, sets how torch allocates device memory."""

BACKEND = re.compile(r"(?:^|,)\s*backend\s*:[^,]*")
"""ComfyUI may choose cudaMallocAsync; NCCL's buffers do not go with it."""

FOR_REMOTE_WORKERS = (names.LISTEN, names.MODELS, SECRET_FILE)
"""What torchrun's workers are told; they may run beside ComfyUI, and it is no business of the workers that we start."""

LONGEST_SOCKET_PATH = 107
"""Bytes that the kernel takes as the path of a Unix socket."""

KILL_SECONDS = 10
"""The kernel may take its time to end a process with much device memory."""


@dataclass
class WorkerProcesses:
    """The processes of one generation and what they share with us."""

    folder: OwnedFolder
    processes: list[WorkerProcess]
    server: ForkServer
    death_pipe: int

    def log_tail(self, rank: int, lines: int = 12) -> str:
        """The last lines a worker printed, or, if it was never forked, those of the fork server."""
        try:
            text = log_path(self.folder.path, rank).read_text(errors="replace")
        except OSError:
            return self.server.log_tail(lines)
        return "\n".join(text.strip().splitlines()[-lines:])

    def end(self, grace: float) -> None:
        """Give the processes `grace` seconds to leave, kill those that stay, and remove every trace."""
        for process in self.processes:
            try:
                process.wait(grace)
            except (subprocess.TimeoutExpired, OSError):
                grace = 0
        os.close(self.death_pipe)
        for process in self.processes:
            process.kill()
        forking = any(
            process.pid is not None for process in self.processes
        )  # or the server imports yet, and will not fork
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILL_SECONDS if forking else 0)
        self.folder.remove()


def make_folder() -> OwnedFolder:
    """Make the folder for one generation's socket, rendezvous and logs. Raises OSError."""
    return OwnedFolder(folder())


def sweep_folders() -> None:
    """Remove what processes that were killed have left in the temporary folders. Never fails."""
    with contextlib.suppress(OSError):
        for parent in {tempfile.gettempdir(), folder()}:
            sweep(parent)


def folder() -> str:
    """Return the temporary folder, or another folder if a socket's path in it would be too long."""
    usual, short = tempfile.gettempdir(), "/tmp"
    alternatives = [
        path for path in (os.environ.get("XDG_RUNTIME_DIR", ""), short) if os.access(path, os.W_OK | os.X_OK)
    ]
    return next((path for path in (usual, *alternatives) if _takes_a_socket(path)), short)


def _takes_a_socket(folder: str) -> bool:
    try:
        path = str(socket_path(Path(folder, f"{PREFIX}12345678"))).encode()
    except UnicodeEncodeError:  # torch's store knows no other paths than those in UTF-8
        return False
    return len(path) <= LONGEST_SOCKET_PATH


def socket_path(directory: Path) -> Path:
    """Where a generation's workers find the host."""
    return directory / "socket"


def launch(
    server: ForkServer,
    folder: OwnedFolder,
    devices: tuple[str, ...],
    generation: int,
    kernels_early: bool,
    imports: Sequence[str],
) -> WorkerProcesses:
    """Start one process a device. They end when the returned death pipe closes, however our process ends.

    Raises:
        Refused: the environment names a network interface that is not there.
        OSError: they cannot be started.
    """
    directory, environment = folder.path, group_environment(len(devices), kernels_early)
    check_interfaces(environment, nccl=any(device.startswith("cuda") for device in devices))
    variables = [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(len(devices)),
            names.DEVICE: device,
            names.RENDEZVOUS: str(directory / "rendezvous"),
            names.SOCKET: str(socket_path(directory)),
            names.GENERATION: str(generation),
            names.RUN_DIRECTORY: str(directory),
        }
        for rank, device in enumerate(devices)
    ]
    death_read, death_write = os.pipe()
    try:
        processes = server.start(generation, directory, environment, variables, imports, death_read)
    except BaseException:
        os.close(death_write)
        raise
    finally:
        os.close(death_read)
    return WorkerProcesses(folder, processes, server, death_write)


def wants_kernels_early(plan: ResolvedPlan) -> bool:
    """Whether a plan's workers must load all kernels when they start.

    CUDA loads a kernel when it is first used, and may wait for the GPU to do so. In PipeFusion a stage's send is on the GPU
    until the next stage takes it, which may be loading a kernel too: stages could wait for each other for ever.
    """
    return plan.pipefusion > 1 and plan.transport == "nccl"


def group_environment(workers: int, kernels_early: bool) -> dict[str, str]:
    """What all workers of a group get; what the user has set comes first."""
    defaults = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // workers)),
        "TORCHINDUCTOR_CACHE_DIR": str(cache_folder() / "compiled"),  # shared by ranks, and there after a restart
        "TORCHINDUCTOR_VEC_ISA_OK": "1",  # what /proc/cpuinfo has works: each process would try it by importing torch in another
    }
    if kernels_early:
        defaults["CUDA_MODULE_LOADING"] = "EAGER"
    return defaults | worker_environment()


def worker_environment() -> dict[str, str]:
    """Return our environment with the pack and ComfyUI importable, and with sockets on the loopback interface."""
    inherited = {name: value for name, value in os.environ.items() if name not in FOR_REMOTE_WORKERS}
    for name in ALLOCATOR_SETTINGS & inherited.keys():
        setting = BACKEND.sub("", inherited.pop(name)).strip(", ")
        inherited |= {name: setting} if setting else {}  # expandable_segments and the like stay
    paths = [str(PACK_ROOT), *filter(None, [inherited.get("PYTHONPATH")])]
    defaults = {GLOO: "lo", NCCL: "lo"}
    return defaults | own_comfyui() | inherited | {"PYTHONPATH": os.pathsep.join(paths)}


def own_comfyui() -> dict[str, str]:
    """Where workers find the ComfyUI that this process runs, and how it was started; nothing in another process."""
    options = sys.modules.get("comfy.options")
    if options is None or not options.args_parsing:
        return {}
    folder = Path(str(options.__file__)).resolve().parents[1]
    return {FOLDER: str(folder), ARGUMENTS: json.dumps(sys.argv[1:])}
