"""Ulysses over two CPU ranks: diffusers' context parallelism against this pack's, same weights, inputs and run.

From the repository's root: OMP_NUM_THREADS=1 python -m benchmarks.diffusers_context_parallel
Both are run as they are, and with their blocks compiled by inductor: diffusers' by its compile_repeated_blocks, for this
one size; ours as TorchCompileModel asks for it, for all sizes. The four take turns, each as often in front as behind;
prints Markdown tables and writes docs/measured/diffusers-context-parallel.md.

diffusers asks torch.accelerator for devices, of which a CPU has none; `their_model` stands in for it. Their bytes are
counted in the two functional collectives that they call, ours by the meter; both without what a rank keeps for itself.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.multiprocessing.spawn import spawn

from parallel_backend.comm.communicator import Communicator
from parallel_backend.comm.meter import Meter
from parallel_backend.diffusion import ModelSpec
from parallel_backend.mesh import build_mesh
from parallel_backend.models.family import Execution
from parallel_backend.models.inputs import Inputs
from parallel_backend.weights.adapters.merging import Keep
from parallel_backend.weights.loading.reading import Neighbours, Watch
from parallel_backend.weights.stores.block_access import BlockAccess
from parallel_backend.weights.stores.store import WeightStore
from parallel_backend.weights.stores.whole import Whole
from parallel_backend.worker.memory.stage_part import StagePart, stages
from tests.support.comfy_oracle import comfy_on_path
from tests.support.plans import cpu_plan
from tests.support.tiny.flux import CHANNELS, HEAD_DIM, POOLED_WIDTH, TEXT_WIDTH
from tests.support.tiny.models import randomise

PAGE = Path(__file__).parents[1] / "docs" / "measured" / "diffusers-context-parallel.md"
COMMAND = "OMP_NUM_THREADS=1 python -m benchmarks.diffusers_context_parallel"
RANKS = 2
AIM = 0.95
COMPILER = "inductor"
MODES = ("", COMPILER)
"""What compiles the blocks of both; nothing at first."""
CPU = torch.device("cpu")

Forward = Callable[[str], Tensor]
"""A whole forward in one of the modes."""


@dataclass(frozen=True)
class Settings:
    """The tiny model, the picture (`side` tokens each way) and how many forwards of each kind are timed."""

    heads: int = 4
    double_blocks: int = 2
    single_blocks: int = 4
    side: int = 32
    text: int = 128
    rounds: int = 40
    warmup: int = 3


@dataclass
class Measured:
    """What rank 0 saw of a mode: wall and CPU seconds of each forward, bytes sent in one, how far the outputs are apart."""

    theirs: list[tuple[float, float]]
    ours: list[tuple[float, float]]
    their_bytes: int
    our_bytes: int
    error: float
    load: tuple[float, float]
    """The machine's load average of a minute when the turns began and when they ended."""


def draw(settings: Settings) -> tuple[Tensor, Tensor, Tensor]:
    """Image tokens, text and pooled text, the same on every rank."""
    generator = torch.Generator().manual_seed(5)
    shapes = (settings.side**2, 4 * CHANNELS), (settings.text, TEXT_WIDTH), (POOLED_WIDTH,)
    tokens, text, pooled = (torch.randn(1, *shape, generator=generator) for shape in shapes)
    return tokens, text, pooled


def save_model(folder: str, settings: Settings) -> None:
    """Write a random FLUX as diffusers does."""
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=4 * CHANNELS,
        num_layers=settings.double_blocks,
        num_single_layers=settings.single_blocks,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=settings.heads,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=POOLED_WIDTH,
        guidance_embeds=False,
    )
    randomise(model, seed=3).save_pretrained(folder)


def their_model(folder: str, compiler: str) -> Any:
    """The model of a folder with diffusers' context parallelism switched on, its blocks compiled if a compiler is named."""
    from diffusers import ContextParallelConfig, FluxTransformer2DModel

    module = FluxTransformer2DModel.from_pretrained(folder)
    module.eval().requires_grad_(False)
    with (
        mock.patch.object(torch._C, "_get_accelerator", return_value=CPU),
        mock.patch.object(torch.accelerator, "device_count", return_value=1),
    ):
        module.enable_parallelism(config=ContextParallelConfig(ulysses_degree=RANKS))
    if compiler:
        module.compile_repeated_blocks(backend=compiler)
    return module


def picture_of(tokens: Tensor, side: int) -> Tensor:
    """A latent of the tokens that FLUX makes of it."""
    squares = tokens.view(1, side, side, CHANNELS, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return squares.reshape(1, CHANNELS, 2 * side, 2 * side)


@contextmanager
def counting(sent: list[int]) -> Iterator[None]:
    """Append the bytes that each functional collective called inside sends to other ranks."""
    exchange, gather = functional.all_to_all_single, functional.all_gather_tensor

    def counted_exchange(x: Tensor, *arguments: Any, **named: Any) -> Tensor:
        sent.append(x.nbytes * (RANKS - 1) // RANKS)
        return exchange(x, *arguments, **named)

    def counted_gather(x: Tensor, *arguments: Any, **named: Any) -> Tensor:
        sent.append(x.nbytes * (RANKS - 1))
        return gather(x, *arguments, **named)

    with (
        mock.patch.object(functional, "all_to_all_single", counted_exchange),
        mock.patch.object(functional, "all_gather_tensor", counted_gather),
    ):
        yield


def timed(forward: Callable[[], Tensor]) -> tuple[float, float]:
    """Seconds until every rank has finished a forward that all began together, and this rank's CPU seconds in it."""
    dist.barrier()
    started, used = time.perf_counter(), time.process_time()
    forward()
    dist.barrier()
    return time.perf_counter() - started, time.process_time() - used


def whole(module: nn.Module, blocks: Sequence[nn.Module]) -> tuple[WeightStore, BlockAccess]:
    """Every rank holds all weights of its stage."""
    return Whole(module), BlockAccess()


@torch.no_grad()
def run_rank(rank: int, path: str, rendezvous: str, settings: Settings, results: Any) -> None:
    """One rank; rank 0 puts what it measured into `results`."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
    meter = Meter()
    plan = cpu_plan(ulysses=RANKS, blocks=settings.double_blocks + settings.single_blocks)
    mesh = build_mesh(plan, CPU, meter)
    comfy_on_path()
    spec = ModelSpec("comfyui", path, 0, 0, "float32")
    neighbours = Neighbours(Communicator("loading", dist.group.WORLD, CPU, False, meter), (0,) * RANKS)
    watch = Watch(lambda: False, lambda *_: None, lambda _: None)
    part = StagePart(spec, stages(plan)[rank], whole, CPU, neighbours, watch, Keep(bool, bool))
    part.fill()
    stages_of = {mode: part.model.forward_on(Execution(mesh, plan, part.access, lambda: None, mode)) for mode in MODES}
    modules = {mode: their_model(path, mode) for mode in MODES}

    tokens, text, pooled = draw(settings)
    latent = picture_of(tokens, settings.side)
    shape = tuple(latent.shape)
    timestep = torch.full((1,), 0.7)
    inputs = Inputs("benchmark", shape, torch.float32, CPU, timestep, {"context": text, "y": pooled})
    ids = torch.cartesian_prod(torch.zeros(1), *[torch.arange(settings.side).float()] * 2)

    def ours(mode: str) -> Tensor:
        output = stages_of[mode](inputs, latent, None)
        assert output is not None
        assert not stages_of[mode].uncompiled()
        return output

    def theirs(mode: str) -> Tensor:
        (output,) = modules[mode](
            hidden_states=tokens,
            encoder_hidden_states=text,
            pooled_projections=pooled,
            timestep=timestep,
            img_ids=ids,
            txt_ids=torch.zeros(settings.text, 3),
            return_dict=False,
        )
        return picture_of(output, settings.side)

    sent: list[int] = []
    meter.reset()
    ours("")
    our_bytes = sum(meter.sent.values())
    with counting(sent):
        theirs("")
    errors = {}
    for mode in MODES:
        output, reference = ours(mode), theirs(mode)
        errors[mode] = ((output - reference).norm() / reference.norm()).item()
    forwards = [(forward, mode) for mode in MODES for forward in (theirs, ours)]
    for _ in range(settings.warmup):
        for forward, mode in forwards:
            timed(partial(forward, mode))
    seconds: dict[tuple[Forward, str], list[tuple[float, float]]] = {each: [] for each in forwards}
    load = os.getloadavg()[0]
    for number in range(settings.rounds):
        for forward, mode in forwards if number % 2 else forwards[::-1]:
            seconds[forward, mode].append(timed(partial(forward, mode)))
    loads = load, os.getloadavg()[0]
    if rank == 0:
        results.put(
            [
                asdict(Measured(seconds[theirs, mode], seconds[ours, mode], sum(sent), our_bytes, errors[mode], loads))
                for mode in MODES
            ]
        )
    dist.barrier()
    dist.destroy_process_group()


def measure(settings: Settings) -> list[Measured]:
    """Run both on two processes, in each mode."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/flux"
        save_model(path, settings)
        results = mp.get_context("spawn").SimpleQueue()
        arguments = (path, f"file://{folder}/rendezvous", settings, results)
        spawn(run_rank, arguments, nprocs=RANKS)  # what rank 0 puts fits into the queue's pipe
        return [Measured(**each) for each in results.get()]


def table(mode: str, measured: Measured) -> tuple[str, ...]:
    """A mode's section of the document."""
    wall = [[seconds for seconds, _ in runs] for runs in (measured.theirs, measured.ours)]
    processor = [statistics.median(seconds for _, seconds in runs) for runs in (measured.theirs, measured.ours)]
    medians, fastest = [statistics.median(runs) for runs in wall], [min(runs) for runs in wall]
    low, _, high = statistics.quantiles([ours / theirs for theirs, ours in zip(*wall, strict=True)], n=4)
    ratios = medians[1] / medians[0], processor[1] / processor[0]
    sent = (measured.their_bytes, measured.our_bytes)
    names = (f"diffusers {_version()}, `ContextParallelConfig(ulysses_degree={RANKS})`", f"this pack, Ulysses {RANKS}")
    rows = [
        f"| {name} | {medians[i]:.3f} | {fastest[i]:.3f} | {processor[i]:.3f} | {sent[i]:,} |"
        for i, name in enumerate(names)
    ]
    columns = (medians, fastest, processor, sent)
    rows.append("| ratio | " + " | ".join(f"{column[1] / column[0]:.3f}" for column in columns) + " |")
    verdict = "met" if max(ratios) < AIM else "**missed**"
    return (
        f"## {f'Blocks compiled by {mode}' if mode else 'Eager'}",
        "",
        "| | seconds a step, median | fastest | CPU seconds of rank 0, median | bytes a rank sends a step |",
        "| --- | ---: | ---: | ---: | ---: |",
        *rows,
        "",
        f"In the middle half of the rounds the ratio is {low:.3f} to {high:.3f}. Aim: ratios of the medians below "
        f"{AIM}, in seconds and CPU seconds; {verdict} ({ratios[0]:.3f} and {ratios[1]:.3f}). "
        f"The outputs differ by {measured.error:.1e} (relative L2).",
        "",
    )


def page(settings: Settings, measured: Sequence[Measured]) -> str:
    """The document."""
    began, ended = measured[0].load
    return "\n".join(
        (
            "# Ulysses against diffusers' own context parallelism",
            "",
            f"Written by `{COMMAND}`: {RANKS} ranks on CPUs (gloo, one thread each), random FLUX in fp32 with "
            f"{settings.heads} heads, {settings.double_blocks} double and {settings.single_blocks} single blocks, "
            f"{settings.side**2} image and {settings.text} text tokens. One step is one forward; "
            f"{settings.rounds} of each, eager and compiled, taking turns. diffusers' `compile_repeated_blocks` compiles for "
            "this size, TorchCompileModel for all sizes. The machine "
            f"has {os.cpu_count()} cores; its load was {began:.1f} at the beginning and {ended:.1f} at the end, including "
            f"{RANKS} from this benchmark. With a load above the cores, only the CPU seconds are meaningful.",
            "",
            *(line for mode, each in zip(MODES, measured, strict=True) for line in table(mode, each)),
        )
    )


def _version() -> str:
    import diffusers

    return str(diffusers.__version__)


def main() -> None:
    """Measure, print and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=Settings.rounds)
    parser.add_argument("--no-page", action="store_true", help="print only")
    arguments = parser.parse_args()
    settings = Settings(rounds=arguments.rounds)
    text = page(settings, measure(settings))
    print(text)
    if not arguments.no_page:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
