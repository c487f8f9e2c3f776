"""Checks the pack's assumptions about GPUs on real GPUs (gpu.sh runs all lists).

    python -m scripts.gpu_check one                                          # one GPU
    python -m scripts.gpu_check compiled                                     # its blocks compiled
    python -m scripts.gpu_check whole                                        # a large model's weights in host memory
    python -m scripts.gpu_check formats                                      # a layer in each format
    python -m scripts.gpu_check shares                                       # rates, and one rank's part of a step
    python -m scripts.gpu_check races                                        # weights that come and go
    python -m torch.distributed.run --nproc-per-node=2 -m scripts.gpu_check connections  # transfers; ranks may share a GPU
    python -m torch.distributed.run --nproc-per-node=2 -m scripts.gpu_check many      # splits
    python -m torch.distributed.run --nproc-per-node=2 -m scripts.gpu_check pipeline  # PipeFusion
    python -m scripts.gpu_check prompts                                      # a real ComfyUI
    python -m scripts.gpu_check ready                                        # only checks that the others would start

Each line is PASS, FAIL or INFO. The worker's own code denoises with random weights. --device cpu runs a small model through the
same code; a check that needs a GPU is INFO there.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
from pathlib import Path

import torch

from parallel_backend.comfyui_folder import FOLDER
from parallel_backend.models.comfyui.importing import import_comfyui

from .connections import Connections
from .formats import Formats
from .many import Many
from .one import Compiled, One, Whole
from .pipeline import Pipeline
from .prompts import Prompts
from .races import Races
from .ready import Ready
from .report import Report
from .shares import Shares
from .stand_ins import stand_ins

LISTS: dict[str, type[Report]] = {
    "ready": Ready,
    "one": One,
    "compiled": Compiled,
    "whole": Whole,
    "formats": Formats,
    "races": Races,
    "shares": Shares,
    "connections": Connections,
    "many": Many,
    "pipeline": Pipeline,
    "prompts": Prompts,
}


def main() -> None:
    """Run one of the lists."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("list", choices=tuple(LISTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    faulthandler.register(signal.SIGTERM, chain=True)  # a list that is ended prints its stack
    import_comfyui()
    with stand_ins(Path(os.environ[FOLDER])), torch.inference_mode():  # as in workers
        LISTS[options.list](options.device).begin_to_end()


if __name__ == "__main__":
    main()
