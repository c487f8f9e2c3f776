"""A worker's settings, from torchrun's variables and from the launcher's variables or the command line."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ...attention.packages import package_failures
from ...comfyui_folder import FOLDER, comfyui_version
from ...comfyui_folder import FOLDER as COMFYUI
from ...identity import code_digest
from ...models.comfyui.content.files import own_files
from ...models.diffusers.diffusers_family import own_diffusers
from ...wire.address import Address
from ...wire.handshake import VARIABLE as SECRET_FILE
from ...wire.handshake import read_secret, secret_path
from ...wire.to_host import RankFacts

RENDEZVOUS = "PARALLEL_RENDEZVOUS"
SOCKET = "PARALLEL_SOCKET"
GENERATION = "PARALLEL_GENERATION"
DEVICE = "PARALLEL_DEVICE"
DEATH_PIPE = "PARALLEL_DEATH_PIPE"
RUN_DIRECTORY = "PARALLEL_RUN_DIRECTORY"
LISTEN = "PARALLEL_LISTEN"
MODELS = "PARALLEL_MODELS"
FAULT_FILE = "PARALLEL_FAULT_FILE"


@dataclass(frozen=True)
class LaunchedWorker:
    """The settings of a worker that ComfyUI started on its own machine.

    Attributes:
        rendezvous: a file in which the ranks find each other.
        socket: the path of the host's socket.
        generation: the number of the group of workers.
        death_pipe: a file descriptor that closes when the host ends.
        run_directory: the folder of the group, which is removed when the host ends.
    """

    rendezvous: str
    socket: str
    generation: int
    death_pipe: int
    run_directory: str


@dataclass(frozen=True)
class ListeningWorker:
    """The settings of a worker that torchrun started.

    Attributes:
        address: the address at which rank 0 listens for ComfyUI and for the other ranks.
        secret: the secret that every caller must show.
        store: host and port of the store in which the ranks find each other.
        own_store: True if rank 0 runs the store, False if torchrun does.
    """

    address: Address
    secret: bytes
    store: tuple[str, int]
    own_store: bool


@dataclass(frozen=True)
class Environment:
    """One rank's settings.

    Attributes:
        rank: the number of this rank.
        world_size: the number of ranks.
        device: the rank's device.
        host: the settings that depend on how the worker was started.
        models: the folders that may hold model files; empty if the host's own paths apply.
        comfyui: ComfyUI's folder, empty if none is named.
        fault_file: the file of faults; None outside of tests.
    """

    rank: int
    world_size: int
    device: torch.device
    host: LaunchedWorker | ListeningWorker
    models: tuple[Path, ...]
    comfyui: str
    fault_file: Path | None

    @classmethod
    def read(cls, arguments: Sequence[str], variables: Mapping[str, str]) -> Environment:
        """Return the settings of a command line and a process environment.

        Raises:
            Refused: the address or the secret cannot be used.
        """
        options = _parser().parse_args(arguments)
        listen = options.listen or variables.get(LISTEN)
        local_rank = int(variables.get("LOCAL_RANK", "0"))
        here = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
        folders = options.models or list(filter(None, variables.get(MODELS, "").split(os.pathsep)))
        return cls(
            rank=int(variables["RANK"]),
            world_size=int(variables["WORLD_SIZE"]),
            device=torch.device(options.device or variables.get(DEVICE) or here),
            host=_listening(listen, options.secret, variables) if listen else _launched(variables),
            models=tuple(Path(folder) for folder in folders),
            comfyui=options.comfyui or variables.get(COMFYUI, ""),
            fault_file=Path(variables[FAULT_FILE]) if FAULT_FILE in variables else None,
        )


def _launched(variables: Mapping[str, str]) -> LaunchedWorker:
    return LaunchedWorker(
        rendezvous=variables[RENDEZVOUS],
        socket=variables[SOCKET],
        generation=int(variables[GENERATION]),
        death_pipe=int(variables[DEATH_PIPE]),
        run_directory=variables[RUN_DIRECTORY],
    )


def _listening(listen: str, secret: str | None, variables: Mapping[str, str]) -> ListeningWorker:
    return ListeningWorker(
        address=Address.parse(listen),
        secret=read_secret(secret_path(variables, secret)),
        store=(variables["MASTER_ADDR"], int(variables["MASTER_PORT"])),
        own_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m parallel_backend.worker",
        description=(
            "Run one worker of a group that ComfyUI reaches over the network. Start it with torchrun, with the same "
            "options on all machines. (Workers on ComfyUI's own machine are started by ComfyUI.)"
        ),
    )
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help=f"the address of rank 0's machine on which rank 0 listens (default: ${LISTEN})",
    )
    parser.add_argument("--secret", metavar="FILE", help=f"the file with the shared secret (default: ${SECRET_FILE})")
    parser.add_argument(
        "--device", help=f"this rank's device (default: ${DEVICE}, else the GPU of LOCAL_RANK, else cpu)"
    )
    parser.add_argument(
        "--models",
        metavar="FOLDER",
        action="append",
        help=f"a folder with this machine's model files; may be repeated (default: ${MODELS})",
    )
    parser.add_argument(
        "--comfyui",
        metavar="FOLDER",
        help=f"this machine's ComfyUI, of the same version as the ComfyUI that connects (default: ${COMFYUI})",
    )
    return parser


def own_facts(device: torch.device) -> RankFacts:
    """Return the versions and devices of this process, for the host's checks."""
    version_of_torch = str(torch.__version__)
    comfyui = os.environ.get(FOLDER, "")
    return RankFacts(
        host=socket.gethostname(),
        device=str(device),
        torch=version_of_torch,
        diffusers=own_diffusers(),
        code=code_digest(),
        comfyui=comfyui_version(comfyui),
        comfyui_files=own_files(comfyui) if comfyui else b"",
        kernel_faults=dict(package_failures(device)),
    )
