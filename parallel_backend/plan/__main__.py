"""Predict the seconds that a picture or a video takes on a machine that you need not have.

The seconds come from the cost model; nothing is measured.

Without --devices: 1, 2, 4 and 8 GPUs side by side. With --devices: every plan for that many GPUs,
and why one is chosen.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .. import markdown
from ..errors import Refused
from .choose import best, table
from .names import named
from .offers import WEIGHT_BYTES, OfferRequest, by_count, by_file, with_weights
from .plan import EXCHANGES, MAX_WORLD_SIZE, WEIGHTS
from .predict.certainty import ERRORS, kind_of
from .predict.known_machines import linked, profile, profile_names
from .predict.known_models import KnownModel, known_model, model_names
from .predict.profiles import DenoiseJob, Profile
from .predict.text_encoders import known_text_encoder, text_encoder_names
from .recipes import HEAD, recipe

UNITS = {"": 1.0, "MB": 1e6, "GB": 1e9, "MIB": 2.0**20, "GIB": 2.0**30}
COUNTS = (1, 2, 4, 8)
CARD = "4090"

WIDTH = 100
"""Columns of the help."""

USUAL_CFG = 6.0
"""The assumed cfg of models that are usually sampled with a negative prompt. Any cfg but 1 costs the same."""


@dataclass(frozen=True)
class Size:
    """The size of a picture or video: width and height in pixels, and frames."""

    width: int
    height: int
    frames: int


def size(text: str) -> Size:
    """Parse a size such as `1024x1024`, or `1360x768x161` for a video of 161 frames."""
    parts = text.lower().split("x")
    if len(parts) not in (2, 3) or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write WIDTHxHEIGHT or WIDTHxHEIGHTxFRAMES")
    width, height, frames = (*map(int, parts), 1)[:3]
    return Size(width, height, frames)


def memory(text: str) -> float:
    """Parse an amount of memory such as `24GB` (or MB, GiB, MiB) and return its bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", text.strip().upper())
    if match is None or match[2] not in UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount of memory: write a number and MB, GB, MiB or GiB")
    return float(match[1]) * UNITS[match[2]]


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of 1 or more")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line. Most options that the user leaves out are None."""
    lists = {"models": model_names(), "cards": profile_names(), "text encoders": text_encoder_names()}
    line = argparse.ArgumentParser(
        prog="python -m parallel_backend.plan",
        description=__doc__,
        epilog="\n".join(
            textwrap.fill(f"{kind}: {', '.join(names)}", WIDTH, break_on_hyphens=False) for kind, names in lists.items()
        ),
        formatter_class=functools.partial(argparse.RawDescriptionHelpFormatter, width=WIDTH),
    )
    line.add_argument("--model", type=named("model", model_names()), help="the model (default: flux-dev)")
    line.add_argument(
        "--text-encoder",
        type=named("text encoder", text_encoder_names()),
        metavar="NAME",
        help="print the memory that each GPU needs for this text encoder under Load Parallel CLIP instead",
    )
    line.add_argument(
        "--dtype",
        choices=list(WEIGHT_BYTES),
        help="dtype of the weights (default: bf16); fp8 is computed in bf16, and fp8_fast, int8 and nvfp4 as they are",
    )
    line.add_argument("--size", type=size, help="WIDTHxHEIGHT or WIDTHxHEIGHTxFRAMES (default: the model's usual one)")
    line.add_argument("--steps", type=positive, help="number of steps (default: the model's usual number)")
    line.add_argument(
        "--card", type=named("card", profile_names()), help=f"the GPUs, with their usual links (default: {CARD})"
    )
    line.add_argument("--devices", type=positive, help="number of GPUs; lists every plan for it")
    line.add_argument("--memory", type=memory, help="memory of each GPU, such as 24GB (default: the card's)")
    line.add_argument(
        "--bandwidth", type=memory, help="bandwidth of each GPU's link per second and direction, such as 25GB"
    )
    line.add_argument("--text", type=positive, help="number of text tokens (default: the model's usual number)")
    line.add_argument("--cfg", type=float, help="the sampler's cfg; any value but 1 adds a negative prompt")
    line.add_argument("--batch", type=positive, default=1, help="pictures at a time (default: 1)")
    line.add_argument("--weights", choices=WEIGHTS, help="how the GPUs store the weights (default: the fastest)")
    line.add_argument(
        "--patches", type=int, default=0, help="number of PipeFusion patches (default: one for each stage)"
    )
    line.add_argument(
        "--exchange",
        choices=EXCHANGES,
        default=EXCHANGES[0],
        help="format of exchanged tensors; fp8 changes the picture slightly",
    )
    line.add_argument("--compiled", action="store_true", help="compile the blocks, like compile on in Parallel Plan")
    line.add_argument(
        "--recipe",
        action="store_true",
        help="print a Markdown table of the best choice for each model on --devices GPUs (default: 2)",
    )
    line.add_argument(
        "--approximate", action="store_true", help="also allow PipeFusion, which changes the picture slightly"
    )
    return line


def machine_of(options: argparse.Namespace) -> Profile:
    """Return the machine of a command line."""
    machine = profile(options.card or CARD)
    machine = machine if options.bandwidth is None else linked(machine, options.bandwidth)
    limit = machine.device.memory if options.memory is None else options.memory
    return replace(machine, device=replace(machine.device, memory=limit), compiled=options.compiled)


def request_of(options: argparse.Namespace) -> tuple[OfferRequest, KnownModel, list[str]]:
    """Return the request of a command line, its model, and the values assumed for missing options, as options in text."""
    known = known_model(options.model or "flux-dev")
    shape = known.shape
    area = options.size or Size(*known.size)
    steps, dtype, card = options.steps or known.steps, options.dtype or "bf16", options.card or CARD
    cfg = options.cfg if options.cfg is not None else (USUAL_CFG if shape.guided else 1.0)
    machine = machine_of(options)
    tokens = shape.image_tokens(area.width, area.height, area.frames)
    if known.work is not None:
        forward = known.work.on(machine.device, tokens)
        machine = replace(machine, forwards=(forward,) * MAX_WORLD_SIZE)
    item_bytes = 0.0 if known.work is None else known.work.working * tokens
    job = DenoiseJob(
        image_tokens=tokens,
        text_tokens=shape.text if options.text is None else options.text,
        batch=options.batch,
        has_uncond=cfg != 1.0,
        steps=steps,
        item_bytes=item_bytes,
    )
    values = {
        "model": shape.name,
        "size": f"{area.width}x{area.height}" + (f"x{area.frames}" if area.frames > 1 else ""),
        "steps": steps,
        "dtype": dtype,
        "card": card,
        "memory": f"{machine.device.memory / 1e9:g}GB",
        "cfg": f"{cfg:g}",
    }
    assumed = [f"--{name} {value}" for name, value in values.items() if getattr(options, name) is None]
    weights = WEIGHTS if options.weights is None else (options.weights,)
    rows = shape.rows(area.height, area.frames)
    return (
        OfferRequest(
            shape,
            with_weights(job, dtype, machine.device),
            machine,
            dtype,
            rows,
            weights,
            options.patches,
            options.approximate,
            options.exchange,
        ),
        known,
        assumed,
    )


def heading(request: OfferRequest) -> str:
    """Return the job and the machine in one line."""
    job, machine = request.job, request.machine
    prompts = "with a negative prompt" if job.has_uncond else "without a negative prompt"
    return (
        f"{request.model.name} in {request.dtype} ({request.model.parameters * job.weight_element / 1e9:.1f} GB of weights), "
        f"{job.image_tokens} image and {job.text_tokens} text tokens, batch {job.batch}, {job.steps} steps {prompts}; "
        f"{machine.name} with {machine.device.memory / 1e9:.1f} GB, links of {machine.levels[0].bandwidth / 1e9:.1f} GB/s"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables and the choice. Return the exit code: 0, or 2 if no plan fits."""
    options = parser().parse_args(arguments)
    if options.recipe:
        print(recipe_table(options), end="")
        return 0
    if options.text_encoder:
        print(text_encoder_table(options))
        return 0
    request, known, assumed = request_of(options)
    if assumed:
        print("Assumed:", " ".join(assumed))
    print(heading(request))
    if known.note:
        print(known.note)
    counts = COUNTS if options.devices is None else (options.devices,)
    print("\nPredicted, not measured: seconds of the denoise, without text encoder, VAE and loading.")
    print(
        f"Likely: of others' measurements, 4 in 5 were within {100 * ERRORS[kind_of(request.dtype)]:.0f} % of such predictions."
    )
    if options.devices is not None:
        return ranking(request, options.devices)
    print(by_count(request, counts))
    print("\nOther files of the model, and how their weights are held, in seconds:")
    print(by_file(request, counts))
    return 0


def recipe_table(options: argparse.Namespace) -> str:
    """Return a Markdown table of the choice for each model, with the model's usual size and steps."""

    def ask(model: str, dtype: str) -> OfferRequest:
        return request_of(argparse.Namespace(**{**vars(options), "model": model, "dtype": dtype}))[0]

    return markdown.table(HEAD, recipe(ask, options.devices or 2))


def text_encoder_table(options: argparse.Namespace) -> str:
    """Return the memory that each GPU needs for a text encoder, by the number of GPUs."""
    encoder, dtype, machine = known_text_encoder(options.text_encoder), options.dtype or "bf16", machine_of(options)
    device, weight_bytes = machine.device, WEIGHT_BYTES[dtype]
    lines = [
        f"{encoder.name} in {dtype} ({encoder.parameters * weight_bytes / 1e9:.1f} GB of weights), the text encoder of "
        f"{encoder.of}; {machine.name} with {device.memory / 1e9:.1f} GB",
        "",
        "GPUs  GB a GPU",
    ]
    for gpus in COUNTS if options.devices is None else (options.devices,):
        needed = encoder.needed(gpus, weight_bytes, device)
        lines.append(f"{gpus:4}  {needed / 1e9:8.1f}" + ("" if needed <= device.memory else "  does not fit"))
    lines.append(
        "More GPUs hold a larger encoder; they do not encode faster. The model takes its turn after the prompts are encoded."
    )
    return "\n".join(lines)


def ranking(request: OfferRequest, devices: int) -> int:
    """Print every plan for this number of GPUs and the choice. Return the exit code: 0, or 2 if no plan fits."""
    plans = [plan for weights in request.weights for plan in request.plans(devices, weights)]
    try:
        choice = best(plans, request.model, request.job, request.machine, request.approximate)
    except Refused as refusal:
        print(refusal, file=sys.stderr)
        print(f"The choices on {devices} GPUs, in seconds:\n{by_file(request, (devices,))}", file=sys.stderr)
        return 2
    print(table(choice.ranking, choice.plan))
    print(f"Chosen: {choice.plan.degrees}, weights {choice.plan.weights}. {choice.why}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
