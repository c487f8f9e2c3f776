"""What loading a checkpoint costs each worker, under four plans: bytes read and memory, as the table of docs/guide/loading.md.

The pages of the file are dropped from the page cache first, so that reads come from the disk.

Run from the repository root: python -m benchmarks.loading [MiB of the file, 2000 by default]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from parallel_backend.host import Backend
from tests.engine.conftest import Runner
from tests.support.loading_costs import loading_costs
from tests.support.plans import cpu_plan
from tests.support.tiny.flux import save_flux

BLOCKS = 4
PLANS = {
    "1 worker": cpu_plan(blocks=BLOCKS),
    "replicated 2": cpu_plan(ulysses=2, blocks=BLOCKS),
    "pipefusion 2": cpu_plan(pipefusion=2, blocks=BLOCKS),
    "pipefusion 4": cpu_plan(pipefusion=4, blocks=BLOCKS),
    "sharded 2": cpu_plan(ulysses=2, weights="sharded", blocks=BLOCKS),
}
MIB_OF_4_HEADS = 91
"""Of a tiny FLUX in 4 blocks; it grows with the square."""


def main() -> None:
    """Print the table."""
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    heads = round(4 * (size / MIB_OF_4_HEADS) ** 0.5)
    with tempfile.TemporaryDirectory() as folder:
        small = save_flux(Path(folder, "small.safetensors"), heads=2, single_blocks=BLOCKS - 1)
        file = save_flux(Path(folder, "file.safetensors"), heads=heads, single_blocks=BLOCKS - 1)
        print(f"A file of {file.stat().st_size >> 20} MiB.\n")
        print(
            "| plan | rank | weights held | read | asked of the kernel | from the disk | peak above idle and weights |"
        )
        print("|---|---|---|---|---|---|---|")
        for name, plan in PLANS.items():
            run = Runner(Backend())
            costs = loading_costs(run, small, file, plan)
            run.close()
            rows = [(c.weights, c.counted, c.asked, c.disk, c.above - c.weights) for c in costs]
            for rank, row in enumerate(rows):
                print(f"| {name if rank == 0 else ''} | {rank} |", *(f"{n / 2**20:.0f} |" for n in row))
            if len(rows) > 1:
                sums = [sum(column) for column in zip(*rows, strict=True)][:4]
                print("| | all |", *(f"{n / 2**20:.0f} |" for n in sums), "|", flush=True)


if __name__ == "__main__":
    main()
