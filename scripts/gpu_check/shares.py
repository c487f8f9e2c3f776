"""Measurements for plans on one card: rates by size, one rank's part of a step, and ComfyUI's own forward."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallel_backend.attention.kernels import choose_kernel
from parallel_backend.attention.packages import package_failures
from parallel_backend.comm.communicator import Communicator
from parallel_backend.comm.meter import Meter
from parallel_backend.models.comfyui.reduced import keep_two_of_each
from parallel_backend.plan import ResolvedPlan
from parallel_backend.plan.predict.cost import cost
from parallel_backend.plan.predict.known_machines import linked
from parallel_backend.plan.predict.measure import HEAD_DIM, measure, measured_profile
from tests.dry.dry_rank import inspected, model_of, own_forward, planned
from tests.dry.fake_gpu import fake_ranks
from tests.dry.full_size import JOBS
from tests.support.plans import gpu_plan

from .bench import SHORT, SMALL, Bench, nothing
from .one import EAGER
from .report import Work

TOKENS = (576, 1152, 2304, 4608, 9216, 18900, 37800, 75600)
LAYERS = ((3072, 3072), (3072, 12288), (15360, 3072), (5120, 13824))
"""Input and output features of layers of FLUX.1 and Wan."""

ATTENTION = (
    (4608, 4608, 24), (4608, 4608, 12), (4608, 4608, 6), (4608, 4608, 3), (1152, 1152, 24), (576, 4608, 24), (75600, 75600, 5),
    (18900, 18900, 40), (9450, 75600, 40),
)  # fmt: skip
"""Queries, keys and heads: a whole sequence, its parts under Ulysses and Ring, and a patch."""

LINK = 1e11
"""Bytes/s of a link between ranks."""

STEPS = 5
"""Steps of the longer of two runs that are timed."""


@dataclass(frozen=True)
class Shared:
    """A model whose ranks' shares are timed.

    Attributes:
        name: the model's name in JOBS.
        whole: True to run all blocks, false to run two of each kind.
        degrees: the degrees of the plans. The first plan has one rank.
        repeats: number of times that each plan is timed.
    """

    name: str
    whole: bool
    degrees: Sequence[Mapping[str, int]]
    repeats: int


ULYSSES: Sequence[Mapping[str, int]] = ({}, {"ulysses": 2}, {"ulysses": 4}, {"ulysses": 8})
MODELS = (
    Shared("FLUX.1-dev", True, (*ULYSSES, {"ring": 4}), 3),
    Shared("Z-Image", True, ULYSSES[:2], 2),
    Shared("Qwen-Image", False, ULYSSES, 2),
    Shared("Wan 2.2 14B", False, (*ULYSSES, {"ring": 4}), 1),
    Shared("HunyuanVideo 1.5", False, (ULYSSES[0], ULYSSES[3]), 1),
)
ON_THE_CPU = (Shared(SMALL, True, ({}, {"ulysses": 2}, {"ring": 2}), 1),)


class Shares(Bench):
    """Checks of one rank out of many, whose exchanges do nothing."""

    def run(self) -> None:
        """Measure rates, then models, the longest last."""
        self.each(self.device_rates, self.layers, self.attentions)
        self.each(*(functools.partial(self.shares, shared) for shared in (MODELS if self.cuda else ON_THE_CPU)))

    def median(self, work: Work, runs: int = 7) -> float:
        """Return the milliseconds of one run, by the device's own clock."""
        if not self.cuda:
            return self.milliseconds(work, 2)
        for _ in range(3):
            work()
        times = []
        for _ in range(runs):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return statistics.median(times)

    def draw(self, *shape: int) -> Tensor:
        """Return random numbers as a model's activations are."""
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def device_rates(self) -> None:
        """Measure the device as workers measure it for plans."""
        alone = Communicator("subgroup", None, self.device, False, Meter(device=self.device))
        kernel = choose_kernel("auto", self.device, self.dtype, HEAD_DIM, package_failures(self.device))
        self.machine = measure(self.device, alone, 0.0, (self.name,), kernel.attend)
        figures = {
            name: getattr(self.machine, name)
            for name in ("matmul", "attention", "bandwidth", "launch", "host_bandwidth")
        }
        memory = float(torch.cuda.mem_get_info()[1]) if self.cuda else 0.0
        text = ", ".join(f"{name} {value:.3g}" for name, value in figures.items())
        self.say(
            "rates for plans",
            None,
            f"{text}, memory {memory:.3g}",
            **figures,
            **({"memory": memory} if memory else {}),
        )

    def layers(self) -> None:
        """Measure layers by their tokens."""
        for features, out in LAYERS if self.cuda else ((64, 64),):
            layer, rates = self.draw(out, features), []
            for tokens in TOKENS if self.cuda else (64,):
                x = self.draw(tokens, features)
                milliseconds = self.median(functools.partial(torch.nn.functional.linear, x, layer))
                rates.append(f"{tokens}: {2 * tokens * features * out / milliseconds / 1e9:.0f}")
            self.say(f"TFLOP/s of a layer {features} to {out}, by tokens", None, ", ".join(rates))

    def attentions(self) -> None:
        """Measure every kernel, with its log-sum-exp, at every share of an attention."""
        for choice, kernel in self.attention_kernels(self.dtype, HEAD_DIM):
            rates = []
            for queries, keys, heads in ATTENTION if self.cuda else ((64, 64, 2),):
                q, k, v = (self.draw(1, tokens, heads, HEAD_DIM) for tokens in (queries, keys, keys))
                milliseconds = self.median(functools.partial(kernel.attend, q, k, v), 3)
                rates.append(
                    f"{queries}x{keys}x{heads}: {4 * queries * keys * heads * HEAD_DIM / milliseconds / 1e9:.0f}"
                )
            self.say(f"TFLOP/s of attention by {kernel.name} ({choice})", None, ", ".join(rates))

    def shares(self, shared: Shared) -> None:
        """Time a step of rank 0 under each plan, and ComfyUI's own forward."""
        job = JOBS[shared.name]
        model = model_of(shared.name, whole=shared.whole)
        model.module.to_empty(device=self.device)
        for key, parameter in model.module.named_parameters():
            parameter.data.copy_(self.values(key, parameter.shape))
        title = shared.name if shared.whole else f"{shared.name}, {job.short} blocks"
        alone = 0.0
        for degrees in shared.degrees:
            plan = gpu_plan(blocks=job.blocks if shared.whole else job.short, **degrees)
            with fake_ranks(0, plan.world_size) if plan.world_size > 1 else nullcontext():
                _, run = self.ours(shared.name, plan, model)
                for steps in (SHORT, STEPS):  # the first run of a length takes longer
                    run(steps, nothing)
                step, host = self.step(run, STEPS, shared.repeats)
            alone = alone or step
            text = f"{step:.1f} ms (host {host:.1f}), {alone / step:.2f} times as fast as one rank"
            self.say(f"{title}, a rank's share, {plan.degrees}", None, text + self.predicted(shared, plan))
        dtype = getattr(torch, self.computes_in)
        own = self.median(own_forward(shared.name, self.own_module(shared, model, dtype), self.device, dtype), 5)
        text = f"ratio {alone / own:.3f}: ours {alone:.1f} ms, ComfyUI's {own:.1f} ms"
        self.say(f"{title}, a step against ComfyUI's forward", alone <= EAGER * own if self.cuda else None, text)

    def predicted(self, shared: Shared, plan: ResolvedPlan) -> str:
        """Return the cost model's compute and launch times of a rank's step as text; empty for a part of a model."""
        if not shared.whole:
            return ""
        memory = (float(torch.cuda.mem_get_info()[0]),) if self.cuda else (1e12,)
        machine = linked(measured_profile(self.machine, memory, self.cuda), LINK)  # the link's time is not shown
        found = cost(plan, *planned(shared.name), machine)
        return f"; predicted {1e3 * found.device:.1f} ms of computing and {1e3 * found.launch:.1f} ms of launches"

    def own_module(self, shared: Shared, model: Any, dtype: torch.dtype) -> torch.nn.Module:
        """Return ComfyUI's own diffusion model with the same weights."""
        config = inspected(shared.name)[1]
        module: torch.nn.Module = config.base(dtype).diffusion_model
        if not shared.whole:
            keep_two_of_each(module, config.declaration)
        module.to_empty(device=self.device)
        weights = dict(model.module.state_dict())
        for key, tensor in module.state_dict().items():
            same = key in weights and weights[key].shape == tensor.shape
            tensor.copy_(weights[key] if same else self.values(key, tensor.shape))
        return module
