"""What a rank tells of itself, for all ranks to be compared."""

from __future__ import annotations

import os
import socket

import torch

from ...attention.packages import package_failures
from ...comfyui_folder import FOLDER, comfyui_version
from ...identity import code_digest
from ...models.comfyui.content.files import own_files
from ...models.diffusers.installed import own_diffusers
from ...wire.to_host import RankFacts


def own_facts(device: torch.device) -> RankFacts:
    """What this process tells of itself."""
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
