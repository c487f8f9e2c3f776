"""What a worker is told by its environment: torchrun's variables and the launcher's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

RENDEZVOUS = "PARALLEL_RENDEZVOUS"
SOCKET = "PARALLEL_SOCKET"
GENERATION = "PARALLEL_GENERATION"
DEVICE = "PARALLEL_DEVICE"
TRANSPORT = "PARALLEL_TRANSPORT"
DEATH_PIPE = "PARALLEL_DEATH_PIPE"
RUN_DIRECTORY = "PARALLEL_RUN_DIRECTORY"


@dataclass(frozen=True)
class Environment:
    """One rank's settings.

    `rendezvous` is torch.distributed's init method. `death_pipe` closes when the host dies; `run_directory` is then
    removed.
    """

    rank: int
    world_size: int
    device: torch.device
    transport: str
    rendezvous: str
    socket: str
    generation: int
    death_pipe: int
    run_directory: str

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> Environment:
        """The settings in a process environment."""
        return cls(
            rank=int(variables["RANK"]),
            world_size=int(variables["WORLD_SIZE"]),
            device=torch.device(variables[DEVICE]),
            transport=variables[TRANSPORT],
            rendezvous=variables[RENDEZVOUS],
            socket=variables[SOCKET],
            generation=int(variables[GENERATION]),
            death_pipe=int(variables[DEATH_PIPE]),
            run_directory=variables[RUN_DIRECTORY],
        )
