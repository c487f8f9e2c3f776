"""One rank's denoise at full size on a GPU that computes nothing, by the worker's own code."""

from __future__ import annotations

import functools
import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType
from torch import Tensor, nn

from parallel_backend.attention.kernels import warm_up_kernels
from parallel_backend.comm.meter import Meter
from parallel_backend.diffusion import ModelSpec, Prompt
from parallel_backend.mesh import Mesh, build_mesh
from parallel_backend.models import FAMILIES
from parallel_backend.models.comfyui.conditioning import picture_shape
from parallel_backend.models.family import Stage
from parallel_backend.plan import AXES, ResolvedPlan
from parallel_backend.plan.cost import Job as PlanJob
from parallel_backend.plan.cost import needs
from parallel_backend.weights.checkpoint import read_header
from parallel_backend.weights.expansion import Expansion, expand_by
from parallel_backend.weights.gguf_blocks import BLOCK_TYPES
from parallel_backend.weights.layers import pack
from parallel_backend.weights.packing import expanding_bytes, shape_parameters
from parallel_backend.wire.messages import Sample
from parallel_backend.worker.memory.stage_part import stages
from parallel_backend.worker.requests.sampling import sample

from .fake_gpu import DEVICE, Counts, FakeGpu
from .full_size import JOBS, Job, write_header

STEPS = 3
COUNTED = 2
"""The step that is counted; the first one is whole."""


@dataclass(frozen=True)
class Result:
    """One step of a rank, and where any step would have waited.

    `blocks` are the kernels of a block by its class, the most of any; `sent` are bytes; `blocks_run` counts blocks. `peak`
    is the most of all steps, `formula` what plans go by for it.
    """

    kernels: int
    collectives: int
    sent: int
    peak: int
    formula: float
    blocks: dict[str, int]
    blocks_run: int
    waits: list[str]


@dataclass
class Step:
    """What has been counted when a step begins."""

    counts: Counts
    sent: int
    blocks: dict[str, list[int]]


class DryRank:
    """What `sample` asks of a rank, without a host, weights or other ranks; `room` bytes are spare for expanded weights."""

    def __init__(self, gpu: FakeGpu, model: Any, room: int = 0) -> None:
        self.device = DEVICE
        self.meter = Meter()
        self.expansion = Expansion(fused=False)
        self._room = room
        self.link = self.status = self.world = self
        self.steps: list[Step] = []
        self._gpu = gpu
        self._model = model
        self._blocks: dict[str, list[int]] = {}

    def mesh(self, plan: ResolvedPlan) -> Mesh:
        """Of believed-in ranks."""
        return build_mesh(plan, DEVICE, self.meter)

    def prepare(self, message: Sample, mesh: Mesh) -> tuple[Any, Any]:
        """The model without data."""
        expand_by(self._model.module, self.expansion)
        return self._model, self._model.forward_on(mesh, message.plan, self, lambda: None)

    def keeping(self) -> AbstractContextManager[None]:
        """As far as there is room."""
        return self.expansion.keeping(self._room)

    @contextmanager
    def block(self, index: int) -> Iterator[None]:
        """A block runs, with its weights whole."""
        before = self._gpu.counts.kernels.total()
        yield
        kind = type(self._model.block_modules[index]).__name__
        self._blocks.setdefault(kind, []).append(self._gpu.counts.kernels.total() - before)

    def start(self) -> float:
        """The run begins."""
        return 0.0

    def enter(self, phase: str, step: int = 0) -> None:
        """A step begins: from the first one on nobody may wait."""
        self.steps.append(Step(self._gpu.begin(), sum(self.meter.sent.values()), self._blocks))
        self._blocks = {}
        self._gpu.watch = True

    def report(self, *_: object) -> None:
        """The run is over."""
        self.enter("done")
        self._gpu.watch = False

    def cancelled(self, _: int) -> bool:
        """Nobody has."""
        return False

    def agree(self, flag: bool) -> bool:
        """All are of one opinion."""
        return flag

    def send(self, message: object, tensors: Mapping[str, Tensor] | None = None) -> None:
        """To nobody; what it sends has to be on the host, as a real link reads it."""
        for tensor in (tensors or {}).values():
            tensor.cpu()

    def result(self, formula: float) -> Result:
        """Of the step that is counted."""
        before, step = self.steps[COUNTED - 1], self.steps[COUNTED]
        return Result(
            kernels=step.counts.kernels.total(),
            collectives=step.counts.collectives.total(),
            sent=step.sent - before.sent,
            peak=max(each.counts.peak for each in self.steps[1:]),
            formula=formula,
            blocks={kind: max(kernels) for kind, kernels in step.blocks.items()},
            blocks_run=sum(map(len, step.blocks.values())),
            waits=[f"{count} x {place}" for place, count in Counter(self._gpu.waits).items()],
        )


def plan_of(blocks: int, patches: int, degrees: Mapping[str, int]) -> ResolvedPlan:
    """On as many GPUs as the degrees need."""
    every = dict.fromkeys(AXES, 1) | dict(degrees)
    cut = every["pipefusion"]
    ends = [blocks * stage // cut for stage in range(cut + 1)]
    return ResolvedPlan(
        devices=tuple(f"cuda:{rank}" for rank in range(math.prod(every.values()))),
        patches=patches or cut,
        warmup_steps=1,
        stages=tuple(stop - start for start, stop in pairwise(ends)),
        weights="replicated",
        attention="auto",
        memory_limit=0.0,
        shares=(1,) * (every["ring"] * every["ulysses"]),
        **every,
    )


def dry_run(
    name: str, *, rank: int = 0, patches: int = 0, whole: bool = True, stored: str = "", room: int = 0, **degrees: int
) -> Result:
    """Three steps of one rank of a plan.

    Args:
        name: of JOBS.
        whole: every block, or the first two of each kind, which shows the same kernels a block and as many outside.
        stored: a type of GGUF's, in which the blocks' matrices are.
        room: bytes that are spare for expanded ones.
    """
    job = JOBS[name]
    plan = plan_of(job.blocks if whole else job.short, patches, degrees)
    model = model_of(name, whole=whole, stage=stages(plan)[rank])
    expanded = 0
    if stored:
        storage = BLOCK_TYPES[GGMLQuantizationType[stored]]
        expanded = max(expanding_bytes(storage, layer.weight.numel(), 2) for layer in linears(model))
        for layer in linears(model):
            pack(layer, storage, scaled=False)
    gpu = FakeGpu()
    with gpu.running(rank, plan.world_size):
        model.module.to_empty(device=DEVICE)
        gpu.keep()
        warm_up_kernels(DEVICE)
        dry = DryRank(gpu, model, room)
        sample(dry, request(job, plan), tensors_of(job, plan.cfg))  # type: ignore[arg-type]
    return dry.result(working_by_formula(name, plan, expanded))


def linears(model: Any) -> list[nn.Linear]:
    """Those of a model's blocks."""
    return [layer for block in model.block_modules for layer in block.modules() if isinstance(layer, nn.Linear)]


def working_by_formula(name: str, plan: ResolvedPlan, expanded: int) -> float:
    """Bytes beside the weights that plans go by, the largest matrix while it is expanded among them."""
    job, (_, config) = JOBS[name], inspected(name)
    family = FAMILIES[job.family]
    text = torch.empty(1, *job.prompt["context"], device="meta")
    asked = PlanJob(
        image_tokens=family.image_tokens(config, picture_shape((1, *job.latent), job.values)),
        text_tokens=family.beside_tokens(config, {"context": text}),
        two_sided=plan.cfg == 2,
        expanded=expanded,
    )
    return needs(plan, family.shape(config), asked).working


@functools.cache
def inspected(name: str) -> tuple[Any, Any]:
    """A model's file of headers, and what it is found to be."""
    with tempfile.TemporaryDirectory() as folder:
        return FAMILIES[JOBS[name].family].inspect(read_header(write_header(Path(folder), name)))


def model_of(name: str, *, whole: bool, stage: Stage | None = None) -> Any:
    """A stage of a model, or all of it, on the meta device."""
    checkpoint, config = inspected(name)
    family, blocks = FAMILIES[JOBS[name].family], JOBS[name].blocks
    if not whole:
        config, blocks = family.two_of_each(config)[0], JOBS[name].short
    model: Any = family.build(config, stage or Stage(0, blocks, blocks))
    exact = dict.fromkeys(family.exact(config), torch.float32)
    shape_parameters(model.module, checkpoint, family.keys(config), torch.bfloat16, exact)
    return model


def own_kernels(name: str) -> int:
    """Kernels of ComfyUI's own forward of the whole model."""
    job = JOBS[name]
    module = inspected(name)[1].base(torch.bfloat16).diffusion_model
    gpu = FakeGpu()
    with gpu.running(0, 1):
        module.to_empty(device=DEVICE)
        given = {key: torch.empty(1, *shape, device=DEVICE, dtype=torch.bfloat16) for key, shape in job.prompt.items()}
        latent = torch.empty(1, *job.latent, device=DEVICE, dtype=torch.bfloat16)
        gpu.begin()
        module(latent, torch.empty(1, device=DEVICE), transformer_options={}, **given)
        return gpu.counts.kernels.total()


def tensors_of(job: Job, sides: int) -> dict[str, Tensor]:
    """Of a request, on the device."""
    prompts = {
        f"prompt.{side}.{key}": torch.empty(1, *shape, device=DEVICE)
        for side in range(sides)
        for key, shape in job.prompt.items()
    }
    levels = torch.linspace(-6, 6, 1000)  # of models that know a table of them
    sigmas = torch.linspace(1, 0, STEPS + 1)
    return {"x": torch.empty(1, *job.latent, device=DEVICE), "sigmas": sigmas, "log_sigmas": levels, **prompts}


def request(job: Job, plan: ResolvedPlan) -> Sample:
    """A denoise; with a negative prompt where the plan has two sides."""
    positive, *negative = [
        [Prompt({key: f"prompt.{side}.{key}" for key in job.prompt}, values=dict(job.values))]
        for side in range(plan.cfg)
    ]
    return Sample(
        request=1,
        model=ModelSpec(job.family, "full size", 0, 0, "bfloat16"),
        plan=plan,
        compute_dtype="bfloat16",
        sampler=job.sampler,
        options={},
        seed=1,
        sampling=job.sampling,
        cfg=float(plan.cfg),
        positive=positive,
        negative=negative[0] if negative else None,
    )
