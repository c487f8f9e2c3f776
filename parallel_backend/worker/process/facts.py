"""What a rank tells of itself, for all ranks to be compared."""

from __future__ import annotations

import socket
from importlib.metadata import PackageNotFoundError, version

import torch

from ...attention.kernels import flash_fault
from ...identity import code_digest
from ...wire.messages import Facts


def own_facts(device: torch.device) -> Facts:
    """This process's."""
    try:
        diffusers = version("diffusers")
    except PackageNotFoundError:
        diffusers = ""
    version_of_torch = str(torch.__version__)
    return Facts(socket.gethostname(), str(device), version_of_torch, diffusers, code_digest(), flash_fault(device))
