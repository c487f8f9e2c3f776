"""Measurements of one rank on its device, and the worker's own denoise with random weights."""

from __future__ import annotations

import math
import os
import statistics
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from parallel_backend.attention.kernels import CHOICES, ChosenKernel, choose_kernel
from parallel_backend.attention.packages import package_failures
from parallel_backend.comm.meter import Meter
from parallel_backend.errors import Refused
from parallel_backend.models.family import Stage
from parallel_backend.plan import ResolvedPlan
from parallel_backend.weights.stores.replicated import ReplicatedStore
from parallel_backend.weights.stores.store import WeightStore
from parallel_backend.worker.requests.sampling import sample
from tests.dry.dry_rank import by_formula, model_of
from tests.dry.full_size import JOBS
from tests.dry.lone_rank import LoneRank, program_for, request, tensors_of
from tests.support.allocations import peak_bytes
from tests.support.plans import gpu_plan

from .report import Report, Work

FLUX, FOUR_BLOCKS, SMALL = "FLUX.1-dev", "FLUX.1-dev, four blocks", "FLUX.1, small"

TYPE = torch.bfloat16
TOLERANCE = 2e-2
FP32_TOLERANCE = 1e-5
SHORT, LONG = 2, 8
"""Steps of two runs, whose difference is timed."""

REPEATS = 3
"""Number of timed runs, of which the fastest counts."""

TURNS = 5
"""Number of times that each of several runs is timed, by turns."""

NUMBERS = (1 << 22) + 3
"""Number of random values from which all weights are made."""

ACTIVE = "active_bytes.all.{}"
"""Name of torch's figure for active bytes. Unlike allocated bytes, they include freed memory that a stream still uses."""

Run = Callable[[int, Work], Tensor | None]
"""A denoise of the given number of steps, which calls the second argument when a step begins.

It returns the result on the rank that has it.
"""


def nothing() -> None:
    """Ignore that a step begins."""


def error_of(found: Tensor, expected: Tensor) -> float:
    """Return the relative L2 error."""
    return float((found.double().cpu() - expected.double().cpu()).norm() / expected.double().norm())


class HostClock:
    """A callback for the beginning of each step, which measures the host's time for the step before.

    The time excludes the device's remaining work.
    """

    def __init__(self, wait: Work) -> None:
        self.milliseconds: list[float] = []
        self._wait = wait
        self._begun = 0.0

    def __call__(self) -> None:
        """Note that a step begins."""
        if self._begun:
            self.milliseconds.append(1e3 * (time.perf_counter() - self._begun))
        self._wait()
        self._begun = time.perf_counter()


class Bench(Report):
    """The measurements of one rank on its device, and the denoises that are measured."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.ranks = int(os.environ.get("WORLD_SIZE", 1))
        self.gpus = torch.cuda.device_count() if self.cuda else 0
        self.apart = self.gpus >= self.ranks
        """True if each rank has a GPU of its own."""
        self.device = torch.device("cuda", self.rank % self.gpus) if self.cuda else torch.device(kind)
        if self.cuda:
            torch.cuda.set_device(self.device)
        self.name = FOUR_BLOCKS if self.cuda else SMALL
        self.computes_in = "bfloat16" if self.cuda else "float32"  # as ComfyUI does
        self.tolerance = TOLERANCE if self.cuda else FP32_TOLERANCE
        self.compiler = "inductor" if self.cuda else "aot_eager"
        self._numbers = torch.randn(NUMBERS, generator=torch.Generator().manual_seed(1)).to(self.device)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of activations: bf16 on a card, fp32 on the CPU."""
        return TYPE if self.cuda else torch.float32

    def attention_kernels(self, dtype: torch.dtype, width: int) -> Iterator[tuple[str, ChosenKernel]]:
        """Yield each choice of `attention` and its kernel for heads of a width. Report the choices that this device refuses."""
        for choice in CHOICES:
            try:
                yield choice, choose_kernel(choice, self.device, dtype, width, package_failures(self.device))
            except Refused as refusal:
                self.say(f"kernel {choice} {dtype} {width}", None, str(refusal)[:80])

    def wait(self) -> None:
        """Wait until the device has done all its work."""
        if self.cuda:
            torch.cuda.synchronize()

    def milliseconds(self, work: Work, runs: int = 10) -> float:
        """Return the mean milliseconds of a run, over `runs` runs after a warm-up."""
        for _ in range(3):
            work()
        self.wait()
        start = time.perf_counter()
        for _ in range(runs):
            work()
        self.wait()
        return 1e3 * (time.perf_counter() - start) / runs

    def seconds(self, run: Run, steps: int) -> float:
        """Run a denoise of `steps` steps and return its duration in seconds."""
        self.wait()
        start = time.perf_counter()
        run(steps, nothing)
        self.wait()
        return time.perf_counter() - start

    def step(self, run: Run, steps: int = LONG, repeats: int = REPEATS) -> tuple[float, float]:
        """Return the milliseconds of a step, and those of the host alone.

        Args:
            steps: steps of the longer of two runs, whose difference is timed.
            repeats: number of times that each run is timed; the fastest counts.
        """
        times = [(self.seconds(run, SHORT), self.seconds(run, steps)) for _ in range(repeats)]
        short, long = map(min, zip(*times, strict=True))
        return 1e3 * (long - short) / (steps - SHORT), self.host_step(run)

    def host_step(self, run: Run) -> float:
        """Return the median milliseconds that the host takes for a step."""
        clock = HostClock(self.wait)
        run(LONG, clock)
        return statistics.median(clock.milliseconds)

    def by_turns(self, runs: Sequence[Run], repeats: int = TURNS) -> list[list[float]]:
        """Return for each denoise several measurements of the milliseconds of a step.

        The denoises are timed by turns, because a card's clock drifts.
        """
        times: list[list[float]] = [[] for _ in runs]
        for _ in range(repeats):
            for run, found in zip(runs, times, strict=True):
                short, long = self.seconds(run, SHORT), self.seconds(run, LONG)
                found.append(1e3 * (long - short) / (LONG - SHORT))
        return times

    def peak(self, work: Work) -> int:
        """Return the peak bytes of the device that `work` takes beyond the bytes in use before."""
        if not self.cuda:
            return peak_bytes(work)
        self.wait()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_stats()[ACTIVE.format("current")]
        work()
        self.wait()
        return int(torch.cuda.memory_stats()[ACTIVE.format("peak")] - held)

    def values(self, name: str, shape: torch.Size) -> Tensor:
        """Return a parameter's values: the same on every rank, and scaled so that activations stay near 1."""
        start = zlib.crc32(name.encode()) % NUMBERS
        flat = self._numbers.roll(-start).repeat(math.ceil(shape.numel() / NUMBERS))[: shape.numel()]
        if len(shape) > 1:
            return flat.view(shape) / shape[1] ** 0.5
        return flat * 0.1 if name.endswith("bias") else 1 + 0.2 * flat

    def model(
        self,
        name: str,
        arrange: Callable[[nn.Module, Sequence[nn.Module]], WeightStore] | None = None,
        stage: Stage | None = None,
    ) -> tuple[Any, WeightStore]:
        """Return a stage of the model, or all of it, and the store of its weights."""
        model = model_of(name, whole=True, stage=stage)
        store = ReplicatedStore(model.module) if arrange is None else arrange(model.module, model.block_modules)
        store.materialise(self.device)
        for key, parameter in model.module.named_parameters():
            run = store.run(key)
            run.values.copy_(self.values(key, parameter.shape).view(-1)[run.start : run.stop])
        store.settle()
        return model, store

    def plan(self, name: str, degrees: dict[str, int] | None = None, patches: int = 0) -> ResolvedPlan:
        """Return a plan on the devices of this machine. Ranks may share a device."""
        plan = gpu_plan(blocks=JOBS[name].blocks, patches=patches, **(degrees or {}))
        devices = tuple(f"cuda:{rank % self.gpus}" if self.cuda else "cpu" for rank in range(plan.world_size))
        return msgspec.structs.replace(plan, devices=devices)

    def tensors(self, name: str, steps: int, sides: int = 1) -> dict[str, Tensor]:
        """Return a request's tensors, the same on every rank."""
        generator = torch.Generator().manual_seed(2)
        made = tensors_of(
            JOBS[name], sides, steps, lambda *shape: torch.randn(shape, generator=generator).to(self.device)
        )
        return made | {"program": program_for(JOBS[name], steps)}

    def tokens(self) -> int:
        """Return the number of tokens of the picture and its text."""
        _, height, width = JOBS[self.name].latent
        return height * width // 4 + JOBS[self.name].prompt["context"][0]

    def ours(
        self, name: str, plan: ResolvedPlan, model: Any, access: Any = None, compiler: str = ""
    ) -> tuple[LoneRank, Run]:
        """Return the worker's denoise and the rank that runs it."""
        rank = LoneRank(self.device, Meter(device=self.device), model, access, compiler)

        def run(steps: int, on_step: Work) -> Tensor | None:
            rank.on_step = on_step
            sample(rank, request(JOBS[name], plan, self.computes_in), self.tensors(name, steps))  # type: ignore[arg-type]
            return rank.answer.get("result")

        return rank, run

    def needed(self, name: str, plan: ResolvedPlan, run: Run) -> None:
        """Report the peak memory of a plan against the formula's value."""
        run(SHORT, nothing)
        peak, formula = self.peak(lambda: run(SHORT, nothing)), by_formula(self.name, plan).working
        text = f"{peak / 1e6:.0f} MB besides the weights, plans allow {formula / 1e6:.0f} MB"
        if self.cuda:
            text += f"; torch has reserved {torch.cuda.max_memory_reserved() / 1e6:.0f} MB in all"
        self.say(f"memory, {name}", peak <= formula if self.cuda else None, text)
