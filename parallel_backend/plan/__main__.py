"""The ranking of plans for a machine one does not need to have: `python -m parallel_backend.plan --help`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import Refused
from .choose import best, table
from .cost import Job
from .plan import WEIGHTS, ParallelPlan, Workload
from .profiles import ModelShape, model_names, model_shape, profile, profile_names
from .resolve import candidates

UNITS = {"": 1.0, "MB": 1e6, "GB": 1e9, "MIB": 2.0**20, "GIB": 2.0**30}


@dataclass(frozen=True)
class Size:
    """Width and height in pixels, and video frames."""

    width: int
    height: int
    frames: int


def size(text: str) -> Size:
    """`1024x1024`, or `1360x768x161` for a video of 161 frames."""
    parts = text.lower().split("x")
    if len(parts) not in (2, 3) or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write WIDTHxHEIGHT or WIDTHxHEIGHTxFRAMES")
    width, height, frames = (*map(int, parts), 1)[:3]
    return Size(width, height, frames)


def memory(text: str) -> float:
    """`24GB` (or MB, GiB, MiB) in bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", text.strip().upper())
    if found is None or found[2] not in UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is no amount of memory: write a number and MB, GB, MiB or GiB")
    return float(found[1]) * UNITS[found[2]]


def positive(text: str) -> int:
    """An integer from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1")
    return int(text)


def job_of(arguments: argparse.Namespace, model: ModelShape) -> tuple[Job, Workload]:
    """The job as the cost model and as the plans' validation see it."""
    area: Size = arguments.size
    cfg = arguments.cfg if arguments.cfg is not None else (6.0 if model.guided else 1.0)
    job = Job(
        image_tokens=model.image_tokens(area.width, area.height, area.frames),
        text_tokens=model.text if arguments.text is None else arguments.text,
        batch=arguments.batch,
        two_sided=cfg != 1.0,
        steps=arguments.steps,
    )
    return job, Workload(job.batch, job.two_sided, model.rows(area.height, area.frames))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    line = argparse.ArgumentParser(prog="python -m parallel_backend.plan", description=__doc__)
    line.add_argument("--model", default="flux-dev", choices=model_names())
    line.add_argument("--size", type=size, default=Size(1024, 1024, 1), help="WIDTHxHEIGHT or WIDTHxHEIGHTxFRAMES")
    line.add_argument("--devices", type=positive, default=8, help="how many")
    line.add_argument("--profile", default="h100-nvlink", choices=profile_names())
    line.add_argument("--text", type=positive, help="text tokens (default: the model's usual number)")
    line.add_argument("--cfg", type=float, help="the sampler's cfg; other than 1 there is a negative branch")
    line.add_argument("--steps", type=positive, default=28)
    line.add_argument("--batch", type=positive, default=1)
    line.add_argument("--memory", type=memory, help="of one device, such as 24GB (default: the profile's)")
    line.add_argument("--weights", default="replicated", choices=WEIGHTS)
    line.add_argument("--patches", type=int, default=0, help="PipeFusion patches (0: as many as stages)")
    line.add_argument("--stale", action="store_true", help="also choose PipeFusion plans, which change the picture")
    return line


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the ranking and the choice; 2 where no plan can work."""
    asked = parser().parse_args(arguments)
    model, machine = model_shape(asked.model), profile(asked.profile)
    job, workload = job_of(asked, model)
    wish = ParallelPlan(
        pipefusion=1 if asked.weights == "sharded" else 0,
        data=0,
        weights=asked.weights,
        patches=asked.patches,
    )
    found = candidates(wish, asked.devices, model.limits, workload)
    limit = machine.device.memory if asked.memory is None else asked.memory
    print(
        f"{model.name}, {job.image_tokens} image and {job.text_tokens} text tokens, batch {job.batch}, "
        f"{'two branches' if job.two_sided else 'one branch'}, {job.steps} steps, {asked.devices} x {machine.name}, "
        f"{limit / 1e9:.1f} GB each"
    )
    try:
        choice = best(found, model, job, machine, limit, asked.stale)
    except Refused as refusal:
        print(refusal, file=sys.stderr)
        return 2
    print(table(choice.ranking, limit, choice.plan))
    print(f"Chosen: {choice.plan.degrees}. {choice.why}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
