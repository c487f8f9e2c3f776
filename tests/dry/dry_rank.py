"""Runs one rank's denoise at full size on a GPU that computes nothing, with the worker's own code."""

from __future__ import annotations

import functools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gguf import GGMLQuantizationType
from torch import nn

from parallel_backend.attention.kernels import warm_up_kernels
from parallel_backend.comm.communicator import Communicator
from parallel_backend.comm.meter import Meter
from parallel_backend.conditioning import SHAPES, TEXT_PREPARATION, arguments, picture_shape
from parallel_backend.models.families import FAMILIES
from parallel_backend.models.family import Stage
from parallel_backend.plan import ModelShape, ResolvedPlan
from parallel_backend.plan.predict.memory import Needs, needs
from parallel_backend.plan.predict.profiles import DenoiseJob as PlanJob
from parallel_backend.weights.files.checkpoint import read_header
from parallel_backend.weights.formats import BLOCK_TYPES
from parallel_backend.weights.layers.cast import pack
from parallel_backend.weights.layers.packing import expanding_bytes, shape_parameters
from parallel_backend.weights.stores.replicated import ReplicatedStore
from parallel_backend.weights.stores.sharded import Sharded
from parallel_backend.weights.stores.store import BlockAccess, WeightStore
from parallel_backend.weights.stores.streamed import Streamed
from parallel_backend.worker.memory.stage_part import stages
from parallel_backend.worker.requests.sampling import sample
from tests.support.plans import gpu_plan

from .fake_gpu import DEVICE, Counts, FakeGpu
from .full_size import JOBS, write_header
from .lone_rank import LoneRank, program_for, request, tensors_of

COUNTED = 2
"""Number of the counted step. In patches, the first step is whole, and the last step has no next one."""


@dataclass(frozen=True)
class Result:
    """Counts of one step of a rank, and the places where any step would have waited.

    `names` are the step's kernels by name. `blocks` are the most kernels of a block of each class. `passes` are the most passes
    over the features of all tokens that its kernels make besides matmuls and attention. `blocks_run` counts blocks. `sent` are
    bytes. `peak` is the largest peak of all steps in bytes, and `formula` the bytes that plans assume for it.
    """

    kernels: int
    names: dict[str, int]
    collectives: int
    sent: int
    peak: int
    formula: float
    waits: list[str]
    blocks: dict[str, int] = field(default_factory=dict)
    passes: dict[str, float] = field(default_factory=dict)
    blocks_run: int = 0


@dataclass
class Step:
    """The counts when a step begins."""

    counts: Counts
    sent: int
    blocks: dict[str, list[tuple[int, int]]]


class DryRank(LoneRank, BlockAccess):
    """A rank that counts the operations of a denoise on a GPU that computes nothing.

    Args:
        weights: access to the weights of blocks.
        room: spare bytes for expanded weights.
    """

    def __init__(self, gpu: FakeGpu, model: Any, meter: Meter, weights: BlockAccess, room: int) -> None:
        super().__init__(DEVICE, meter, model, self, room=room)
        self.steps: list[Step] = []
        self._weights = weights
        self._gpu = gpu
        self._blocks: dict[str, list[tuple[int, int]]] = {}

    def model_call(self, forwards: int) -> AbstractContextManager[None]:
        """Return the context of the weights' access for a model call."""
        return self._weights.model_call(forwards)

    def forward(self) -> AbstractContextManager[None]:
        """Return the context of the weights' access for a forward."""
        return self._weights.forward()

    @contextmanager
    def block(self, index: int) -> Iterator[None]:
        """Run a block with its full weights, and count its kernels and the bytes that they move."""
        counts = self._gpu.counts
        with self._weights.block(index):
            kernels, moved = counts.kernels.total(), counts.moved
            yield
        kind = type(self._model.block_modules[index]).__name__
        self._blocks.setdefault(kind, []).append((counts.kernels.total() - kernels, counts.moved - moved))

    def enter(self, phase: str, step: int = 0) -> None:
        """Note that a step begins. From the first step on nothing may wait."""
        self.steps.append(Step(self._gpu.begin(), sum(self.meter.sent.values()), self._blocks))
        self._blocks = {}
        self._gpu.watch = True

    def report(self, *_: object) -> None:
        """Note that the run is over."""
        self.enter("done")
        self._gpu.watch = False

    def result(self, formula: float, features: int) -> Result:
        """Return the counts of step COUNTED.

        Args:
            formula: the bytes that plans assume for the peak.
            features: bytes of the features of all tokens.
        """
        before, step = self.steps[COUNTED - 1], self.steps[COUNTED]
        return Result(
            kernels=step.counts.kernels.total(),
            names=dict(step.counts.kernels),
            collectives=step.counts.collectives.total(),
            sent=step.sent - before.sent,
            peak=max(each.counts.peak for each in self.steps[1:]),
            formula=formula,
            blocks={kind: max(kernels for kernels, _ in found) for kind, found in step.blocks.items()},
            passes={kind: max(moved for _, moved in found) / features for kind, found in step.blocks.items()},
            blocks_run=sum(map(len, step.blocks.values())),
            waits=self._gpu.waited(),
        )


def dry_run(
    name: str,
    *,
    rank: int = 0,
    patches: int = 0,
    whole: bool = True,
    stored: str = "",
    room: int = 0,
    **plan_settings: Any,
) -> Result:
    """Run the steps of one rank of a plan up to the counted step, and return its counts.

    Args:
        name: a key of JOBS.
        whole: True for every block, False for the first two of each kind. These show the same kernels in each block and outside
            of blocks.
        stored: a GGUF type in which the blocks' matrices are stored; empty for none.
        room: spare bytes for expanded weights.
        plan_settings: the plan's degrees, weights, chunks of heads and exchange.
    """
    job = JOBS[name]
    blocks = job.blocks if whole else job.short
    plan = gpu_plan(blocks=blocks, patches=patches, **plan_settings)
    model = model_of(name, whole=whole, stage=stages(plan)[rank])
    expanded = 0
    if stored:
        storage = BLOCK_TYPES[GGMLQuantizationType[stored]]
        expanded = max(expanding_bytes(storage, layer.weight.numel(), 2) for layer in linears(model))
        for layer in linears(model):
            pack(layer, storage, scaled=False)
    steps = COUNTED + (plan.patches > 1)
    gpu, program = FakeGpu(), program_for(job, steps)
    with gpu.running(rank, plan.world_size):
        meter = Meter()
        store, access = held(model, plan, meter)
        store.materialise(DEVICE)
        gpu.keep()
        warm_up_kernels(DEVICE)
        dry = DryRank(gpu, model, meter, access, room)
        tensors = tensors_of(job, plan.cfg, steps, functools.partial(torch.empty, device=DEVICE))
        tensors["program"] = program
        sample(dry, request(job, plan), tensors)  # type: ignore[arg-type]
    shape, planned_job = planned(name)
    tokens = planned_job.image_tokens + planned_job.text_tokens * shape.joint_text
    return dry.result(by_formula(name, plan, expanded).activations, 2 * tokens * shape.hidden)


def linears(model: Any) -> list[nn.Linear]:
    """Return the linear layers of a model's blocks."""
    return [layer for block in model.block_modules for layer in block.modules() if isinstance(layer, nn.Linear)]


def held(model: Any, plan: ResolvedPlan, meter: Meter) -> tuple[WeightStore, BlockAccess]:
    """Return a rank's store of weights and its block access. No block of streamed weights stays on the device."""
    if plan.weights == "streamed":
        alone = Communicator("subgroup", None, torch.device("cpu"), False, meter)
        streamed = Streamed(model.module, model.block_modules, alone, DEVICE, meter)
        return streamed, streamed
    if plan.weights == "sharded":
        sharded = Sharded(
            model.module, model.block_modules, Communicator("weights", dist.group.WORLD, DEVICE, False, meter)
        )
        return sharded, sharded
    return ReplicatedStore(model.module), BlockAccess()


def by_formula(name: str, plan: ResolvedPlan, expanded: int = 0) -> Needs:
    """Return the bytes that plans assume; the largest matrix takes `expanded` bytes while it is expanded."""
    shape, job = planned(name)
    return needs(plan, shape, replace(job, has_uncond=plan.cfg == 2, expanded=expanded))


def planned(name: str) -> tuple[ModelShape, PlanJob]:
    """Return the sizes of a model, and of a denoise with one prompt, that plans are judged by."""
    job, (_, config) = JOBS[name], inspected(name)
    family = FAMILIES[job.family]
    text = torch.empty(1, *job.prompt["context"], device="meta")
    image_tokens = family.image_tokens(config, picture_shape((1, *job.latent), job.values))
    return family.shape(config), PlanJob(image_tokens, family.context_tokens(config, {"context": text}))


@functools.cache
def inspected(name: str) -> tuple[Any, Any]:
    """Return a model's checkpoint, which has only a header, and the configuration detected from it."""
    with tempfile.TemporaryDirectory() as folder:
        return FAMILIES[JOBS[name].family].inspect(read_header(write_header(Path(folder), name)))


def model_of(name: str, *, whole: bool, stage: Stage | None = None) -> Any:
    """Return a stage of a model, or all of it, on the meta device."""
    checkpoint, config = inspected(name)
    family, blocks = FAMILIES[JOBS[name].family], JOBS[name].blocks
    if not whole:
        config, blocks = family.two_of_each(config)[0], JOBS[name].short
    model: Any = family.build(config, stage or Stage(0, blocks, blocks))
    exact = dict.fromkeys(family.exact(config), torch.float32)
    shape_parameters(model.module, checkpoint, family.keys(config), torch.bfloat16, exact)
    return model


def own_forward(name: str, module: Any, device: str | torch.device, dtype: torch.dtype) -> Callable[[], object]:
    """Return ComfyUI's own forward of a job's model; its text is prepared before, as ComfyUI's process does."""
    import comfy.utils

    job = JOBS[name]
    draw = functools.partial(torch.randn, 1, device=device, dtype=dtype)
    conditioning = arguments({key: draw(*shape) for key, shape in job.prompt.items()}, job.values)
    if conditioning.pop(TEXT_PREPARATION, None):
        conditioning["context"] = module.preprocess_text_embeds(conditioning["context"])
    latent: Any = draw(*job.latent)
    if SHAPES in conditioning:
        latent = comfy.utils.unpack_latents(latent, conditioning.pop(SHAPES))
    timestep = torch.full((1,), 0.5, device=device)
    return lambda: module(latent, timestep, transformer_options={}, **conditioning)


def own_kernels(name: str) -> Counter[str]:
    """Return the kernels of ComfyUI's own forward of the whole model, by name."""
    module = inspected(name)[1].base(torch.bfloat16).diffusion_model
    gpu = FakeGpu()
    with gpu.running(0, 1):
        module.to_empty(device=DEVICE)
        forward = own_forward(name, module, DEVICE, torch.bfloat16)
        gpu.begin()
        forward()
        return gpu.counts.kernels
