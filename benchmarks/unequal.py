"""What cutting tokens by speed gains where one rank is slower: seconds a step with an even cut and with one by measured blocks.

    python -m benchmarks.unequal [--steps 8]

Two CPU workers on a core each; a busy process shares the second one's core. COMFYUI_PATH names ComfyUI's folder.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from parallel_backend.host import Backend
from parallel_backend.plan import ResolvedPlan
from parallel_backend.plan.shares import paces_by, share_by
from tests.comfy_oracle import comfy_on_path
from tests.engine.conftest import Job, Runner, relative_error, sigmas, spec_of
from tests.plans import cpu_plan
from tests.tiny_flux import save_flux

ROUNDS = 5
BUSY = "import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"


def seconds(run: Runner, job: Job, plan: ResolvedPlan) -> float:
    """Of a step, on the slower rank."""
    run(job, plan)
    assert run.answer is not None
    return max(report.seconds for report in run.answer.reports) / (len(job.sigmas) - 1)


def main() -> None:
    """Print both times and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    comfy_on_path()
    with tempfile.TemporaryDirectory() as folder:
        path = save_flux(Path(folder) / "flux.safetensors", heads=8)
        job = Job(path, sigmas(options.steps), height=64, width=64, text=(256, 256))
        even = cpu_plan(ulysses=2)
        with contextlib.closing(Backend()) as backend:
            run = Runner(backend)
            run(job, even)
            cores = sorted(os.sched_getaffinity(0))[:2]
            for process, core in zip(run.workers(), cores, strict=True):
                os.sched_setaffinity(process, {core})
            busy = subprocess.Popen([sys.executable, "-c", BUSY.format(core=cores[1])])
            example = {"x": job.noise, "timestep": torch.ones(1)} | dict(
                zip(("context", "y"), job.prompts[0], strict=True)
            )
            times = backend._block_times(spec_of("comfyui", path), even, "float32", example, {}, lambda: False)
            shared = share_by(paces_by(times), even)
            print(
                f"paces {paces_by(times)}, {shared.describe()}, off by {relative_error(run(job, shared), run(job, even)):.1e}"
            )
            taken = [(seconds(run, job, even), seconds(run, job, shared)) for _ in range(ROUNDS)]
            busy.kill()
    ours, theirs = (statistics.median(each) for each in zip(*taken, strict=True))
    print(f"even {ours:.3f} s a step, by speed {theirs:.3f} s: ratio {theirs / ours:.3f}")


if __name__ == "__main__":
    main()
