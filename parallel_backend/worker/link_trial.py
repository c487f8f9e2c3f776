"""Times an all-to-all of processes that have nothing else to do, each on a device, and prints its bytes/s.

    python -m parallel_backend.worker.link_trial RANK WORLD_SIZE DEVICE FILE

They find each other by a file. What NCCL reads once from the environment is tried so in a process that has not read it.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from ..comm.communicator import Communicator
from ..comm.meter import Meter
from ..plan.predict.measure import link_speed

PATIENCE = timedelta(seconds=40)


def main() -> None:
    """As the command line says."""
    rank, world_size, name, file = sys.argv[1:]
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{file}",
        rank=int(rank),
        world_size=int(world_size),
        timeout=PATIENCE,
    )
    everyone = Communicator("link", dist.group.WORLD, device, False, Meter())
    bandwidth, _ = link_speed(device, everyone)
    print(bandwidth, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
