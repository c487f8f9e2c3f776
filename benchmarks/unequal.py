"""What cutting tokens by speed gains where one rank is slower: seconds a step with an even cut and with one by measured blocks.

    python -m benchmarks.unequal [--steps 4]

Two CPU workers. Every norm in their blocks sleeps in proportion to its tokens, on the second worker twice as long: so the
figures depend on the cut and little on what else the machine does. COMFYUI_PATH names ComfyUI's folder.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
from pathlib import Path

import torch

from parallel_backend.conditioning import Conditioning
from parallel_backend.host import Backend
from parallel_backend.plan import ResolvedPlan
from parallel_backend.plan.split.tokens import paces_by, share_by
from tests.engine.conftest import Job, Runner, relative_error, sigmas, spec_of
from tests.support.comfy_oracle import comfy_on_path
from tests.support.plans import cpu_plan
from tests.support.tiny.flux import save_flux

ROUNDS = 3
SLOW = """
import os, time
from torch.nn import functional
own = functional.layer_norm
def layer_norm(tokens, *settings, **others):
    time.sleep(0.002 * tokens.shape[1] * (1 + int(os.environ.get("RANK", 0))))
    return own(tokens, *settings, **others)
functional.layer_norm = layer_norm
"""
"""Python runs a module of the name sitecustomize in every process before anything else."""


def seconds(run: Runner, job: Job, plan: ResolvedPlan) -> float:
    """Of a step, on the slower rank."""
    run(job, plan)
    assert run.answer is not None
    return max(report.seconds for report in run.answer.reports) / (len(job.sigmas) - 1)


def main() -> None:
    """Print both times and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    comfy_on_path()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(SLOW)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        path = save_flux(Path(folder) / "flux.safetensors", heads=3)
        job = Job(path, sigmas(options.steps), cfg=1.0, height=16, width=16, text=(32, 32))
        even = cpu_plan(ulysses=2)
        with contextlib.closing(Backend()) as backend:
            run = Runner(backend)
            expected = run(job, even)
            example = {"x": job.noise, "timestep": torch.ones(1)} | dict(
                zip(("context", "y"), job.prompts[0], strict=True)
            )
            times = backend._measurements.blocks(
                spec_of("comfyui", path), even, "float32", Conditioning(example), lambda: False
            )
            shared = share_by(paces_by(times), even)
            error = relative_error(run(job, shared), expected)
            print(f"paces {paces_by(times)}, {shared.describe()}, off by {error:.1e}", flush=True)
            taken = [(seconds(run, job, even), seconds(run, job, shared)) for _ in range(ROUNDS)]
    ours, theirs = (statistics.median(each) for each in zip(*taken, strict=True))
    print(f"even {ours:.3f} s a step, by speed {theirs:.3f} s: ratio {theirs / ours:.3f}")


if __name__ == "__main__":
    main()
