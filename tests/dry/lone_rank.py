"""A rank's denoise by the worker's own code, without a host: what `sample` asks of it, and the request that it is given."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from parallel_backend.comm.meter import Meter
from parallel_backend.diffusion import FlowSettings, ModelSpec, PromptSpec
from parallel_backend.mesh import Mesh, build_mesh
from parallel_backend.mesh_axes import mesh_degrees
from parallel_backend.models.family import Execution
from parallel_backend.plan import ResolvedPlan
from parallel_backend.weights.layers.expansion import Expansion, expand_by
from parallel_backend.weights.stores.store import BlockAccess
from parallel_backend.wire.to_host import DoneReply
from parallel_backend.wire.to_worker import SampleRequest
from parallel_backend.worker.requests.rank import Prepared

from .full_size import Job


class LoneRank:
    """What `sample` asks of a rank. Nobody cancels.

    Args:
        meter: counts what is sent.
        model: this rank's stage, on its device.
        access: how it makes the weights of its blocks usable.
        compiler: of torch.compile, for the blocks; empty for none.
        room: bytes that are spare for weights that have been expanded.

    Attributes:
        on_step: called when a step begins.
        answer: what the host would have got, on the rank that answers it.
        uncompiled: why not, of the kinds of blocks that could not be compiled.
    """

    def __init__(
        self,
        device: torch.device,
        meter: Meter,
        model: Any,
        access: BlockAccess | None = None,
        compiler: str = "",
        room: int = 0,
    ) -> None:
        self.device = device
        self.meter = meter
        self.host = self.status = self.group = self
        self.on_step: Callable[[], object] = lambda: None
        self.answer: Mapping[str, Tensor] = {}
        self.uncompiled: tuple[str, ...] = ()
        self._model = model
        self._access = access or BlockAccess()
        self._compiler = compiler
        self.expansion = Expansion(fused=False)
        self._room = room
        self._meshes: dict[ResolvedPlan, Mesh] = {}

    def mesh(self, plan: ResolvedPlan) -> Mesh:
        """Made once a plan. A collective."""
        if plan not in self._meshes:
            self._meshes[plan] = build_mesh(plan, self.device, self.meter)
        return self._meshes[plan]

    def prepare(self, message: SampleRequest, mesh: Mesh) -> Prepared:
        """The model and its forward."""
        expand_by(self._model.module, self.expansion)
        forward = self._model.forward_on(Execution(mesh, message.plan, self._access, lambda: None, self._compiler))
        return Prepared(self._model, forward, self._access)

    def keeping(self) -> AbstractContextManager[None]:
        """As far as there is room."""
        return self.expansion.keeping(self._room)

    def start(self) -> float:
        """The run begins."""
        return 0.0

    def enter(self, phase: str, step: int = 0) -> None:
        """A step begins."""
        self.on_step()

    def report(self, *_: object) -> None:
        """The run is over."""

    def cancelled(self, _: int) -> bool:
        """Nobody has."""
        return False

    def broadcast_flag(self, flag: bool) -> bool:
        """All are of one opinion."""
        return flag

    def send(self, message: object, tensors: Mapping[str, Tensor] | None = None) -> None:
        """To nobody; what is sent has to be on the host, as a real connection reads it."""
        host = {name: tensor.cpu() for name, tensor in (tensors or {}).items()}
        if isinstance(message, DoneReply):
            self.answer, self.uncompiled = host, tuple(message.uncompiled)


def plan_of(
    blocks: int,
    patches: int,
    degrees: Mapping[str, int],
    weights: str = "replicated",
    head_chunks: int = 1,
    exchange: str = "exact",
) -> ResolvedPlan:
    """On as many GPUs as the degrees need."""
    every = mesh_degrees(**degrees)
    cut = every["pipefusion"]
    ends = [blocks * stage // cut for stage in range(cut + 1)]
    return ResolvedPlan(
        devices=tuple(f"cuda:{rank}" for rank in range(math.prod(every.values()))),
        patches=patches or cut,
        warmup_steps=1,
        stages=tuple(stop - start for start, stop in pairwise(ends)),
        weights=weights,
        attention="auto",
        memory_limit=0.0,
        shares=(1,) * (every["ring"] * every["ulysses"]),
        head_chunks=head_chunks,
        exchange=exchange,
        **every,
    )


def tensors_of(job: Job, sides: int, steps: int, draw: Callable[..., Tensor]) -> dict[str, Tensor]:
    """Of a request; `draw` makes a tensor of a shape."""
    prompts = {f"prompt.{side}.{key}": draw(1, *shape) for side in range(sides) for key, shape in job.prompt.items()}
    levels = torch.linspace(-6, 6, 1000)  # of models that know a table of them
    sigmas = torch.linspace(1, 0, steps + 1)
    return {"x": draw(1, *job.latent), "sigmas": sigmas, "log_sigmas": levels, **prompts}


def program_for(job: Job, steps: int) -> Tensor:
    """What its sampler does, for `tensors_of`; recorded where tensors have data."""
    from tests.support.programs import (
        FlowSampling,
        VelocitySampling,
        encoded_program,
    )  # by now it is known how ComfyUI is switched

    model_sampling = FlowSampling() if isinstance(job.sampling, FlowSettings) else VelocitySampling()
    return encoded_program(
        job.sampler, torch.linspace(1, 0, steps + 1), torch.empty(1, *job.latent), model_sampling=model_sampling
    )


def request(job: Job, plan: ResolvedPlan, computes_in: str = "bfloat16") -> SampleRequest:
    """A denoise; with a negative prompt where the plan has two sides."""
    positive, *negative = [
        [PromptSpec({key: f"prompt.{side}.{key}" for key in job.prompt}, values=dict(job.values))]
        for side in range(plan.cfg)
    ]
    return SampleRequest(
        request=1,
        model=ModelSpec(job.family, "full size", 0, 0, "bfloat16"),
        plan=plan,
        compute_dtype=computes_in,
        sampling=job.sampling,
        cfg=float(plan.cfg),
        positive=positive,
        negative=negative[0] if negative else None,
    )
