"""The start of the worker processes of one generation."""

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
"""Variables in which the user, or ComfyUI for its own process, sets how torch allocates device memory."""

BACKEND = re.compile(r"(?:^|,)\s*backend\s*:[^,]*")
"""Pattern of the allocator's backend in these variables.

ComfyUI may choose cudaMallocAsync, which NCCL's buffers do not support.
"""

FOR_REMOTE_WORKERS = (names.LISTEN, names.MODELS, SECRET_FILE)
"""Variables for torchrun's workers. These may run next to ComfyUI, and the workers that this process starts ignore them."""

LONGEST_SOCKET_PATH = 107
"""Largest number of bytes that the kernel takes as the path of a Unix socket."""

KILL_SECONDS = 10
"""Seconds that the kernel may take to end a process. A process with much device memory takes long."""


@dataclass
class WorkerProcesses:
    """The processes of one generation, and the resources that they share with this process."""

    folder: OwnedFolder
    processes: list[WorkerProcess]
    server: ForkServer
    death_pipe: int

    def log_tail(self, rank: int, lines: int = 12) -> str:
        """Return the last lines that a worker printed, or those of the fork server if the worker was never forked."""
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
        )  # otherwise the server still imports, and will not fork
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILL_SECONDS if forking else 0)
        self.folder.remove()


def make_folder() -> OwnedFolder:
    """Make the folder for one generation's socket, rendezvous and logs. Raises OSError."""
    return OwnedFolder(folder())


def sweep_folders() -> None:
    """Remove the folders that killed processes have left in the temporary folders. This never fails."""
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
    except UnicodeEncodeError:  # torch's store takes only paths in UTF-8
        return False
    return len(path) <= LONGEST_SOCKET_PATH


def socket_path(directory: Path) -> Path:
    """Return the path of the socket at which a generation's workers find the host."""
    return directory / "socket"


def launch(
    server: ForkServer,
    folder: OwnedFolder,
    devices: tuple[str, ...],
    generation: int,
    kernels_early: bool,
    imports: Sequence[str],
) -> WorkerProcesses:
    """Start one process for each device. The processes end when the returned death pipe closes, however this process ends.

    Raises:
        Refused: the environment names a network interface that does not exist.
        OSError: the processes cannot be started.
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
    """Return True if a plan's workers must load all kernels when they start.

    CUDA loads a kernel when it is first used, and may wait for the GPU to do so. In PipeFusion, a stage's send stays on the GPU
    until the next stage takes it, and that stage may be loading a kernel too. The stages could wait for each other forever.
    """
    return plan.pipefusion > 1 and plan.transport == "nccl"


def group_environment(workers: int, kernels_early: bool) -> dict[str, str]:
    """Return the environment of all workers of a group. The user's settings come first."""
    defaults = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // workers)),
        "TORCHINDUCTOR_CACHE_DIR": str(cache_folder() / "compiled"),  # shared by ranks, and kept for the next start
        "TORCHINDUCTOR_VEC_ISA_OK": "1",  # trust /proc/cpuinfo: each test would import torch in one more process
    }
    if kernels_early:
        defaults["CUDA_MODULE_LOADING"] = "EAGER"
    return defaults | worker_environment()


def worker_environment() -> dict[str, str]:
    """Return this process's environment with the pack and ComfyUI importable, and with sockets on the loopback interface."""
    inherited = {name: value for name, value in os.environ.items() if name not in FOR_REMOTE_WORKERS}
    for name in ALLOCATOR_SETTINGS & inherited.keys():
        setting = BACKEND.sub("", inherited.pop(name)).strip(", ")
        inherited |= {name: setting} if setting else {}  # expandable_segments and the like stay
    paths = [str(PACK_ROOT), *filter(None, [inherited.get("PYTHONPATH")])]
    defaults = {GLOO: "lo", NCCL: "lo"}
    return defaults | own_comfyui() | inherited | {"PYTHONPATH": os.pathsep.join(paths)}


def own_comfyui() -> dict[str, str]:
    """Return the variables that tell workers the folder and arguments of this process's ComfyUI; none in another process."""
    options = sys.modules.get("comfy.options")
    if options is None or not options.args_parsing:
        return {}
    folder = Path(str(options.__file__)).resolve().parents[1]
    return {FOLDER: str(folder), ARGUMENTS: json.dumps(sys.argv[1:])}
