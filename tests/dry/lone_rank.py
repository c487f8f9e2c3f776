"""A rank that runs a denoise with the worker's own code and without a host, and the request for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from parallel_backend.comm.meter import Meter
from parallel_backend.diffusion import FlowSettings, ModelSpec, PromptSpec
from parallel_backend.mesh import Mesh, build_mesh
from parallel_backend.models.family import Execution
from parallel_backend.plan import ResolvedPlan
from parallel_backend.weights.layers.expansion import Expansion, expand_by
from parallel_backend.weights.stores.store import BlockAccess
from parallel_backend.wire.to_host import DoneReply
from parallel_backend.wire.to_worker import SampleRequest
from parallel_backend.worker.requests.rank import Prepared

from .full_size import Job


class LoneRank:
    """The interface that `sample` needs of a rank. Nobody cancels.

    Args:
        meter: counts the bytes sent.
        model: this rank's stage, on its device.
        access: makes the weights of its blocks usable.
        compiler: backend of torch.compile for the blocks; empty for none.
        room: spare bytes for expanded weights.

    Attributes:
        on_step: called when a step begins.
        answer: the tensors sent to the host, on the rank that replies.
        uncompiled: the reasons why kinds of blocks could not be compiled.
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
        """Return the plan's mesh, built once for each plan. A collective."""
        if plan not in self._meshes:
            self._meshes[plan] = build_mesh(plan, self.device, self.meter)
        return self._meshes[plan]

    def prepare(self, message: SampleRequest, mesh: Mesh) -> Prepared:
        """Return the model and its forward."""
        expand_by(self._model.module, self.expansion)
        forward = self._model.forward_on(Execution(mesh, message.plan, self._access, lambda: None, self._compiler))
        return Prepared(self._model, forward, self._access)

    def keeping(self) -> AbstractContextManager[None]:
        """Keep expanded weights as far as the spare bytes allow."""
        return self.expansion.keeping(self._room)

    def start(self) -> float:
        """Begin the run."""
        return 0.0

    def enter(self, phase: str, step: int = 0) -> None:
        """Call `on_step` when a step begins."""
        self.on_step()

    def report(self, *_: object) -> None:
        """Ignore the report at the end of the run."""

    def cancelled(self, _: int) -> bool:
        """Return False: nobody cancels."""
        return False

    def broadcast_flag(self, flag: bool) -> bool:
        """Return the flag: all ranks have the same one."""
        return flag

    def send(self, message: object, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Keep a reply instead of sending it. Its tensors must be on the host, as a real connection reads them."""
        host = {name: tensor.cpu() for name, tensor in (tensors or {}).items()}
        if isinstance(message, DoneReply):
            self.answer, self.uncompiled = host, tuple(message.uncompiled)


def tensors_of(job: Job, sides: int, steps: int, draw: Callable[..., Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a request; `draw` makes a tensor of a given shape."""
    prompts = {f"prompt.{side}.{key}": draw(1, *shape) for side in range(sides) for key, shape in job.prompt.items()}
    levels = torch.linspace(-6, 6, 1000)  # models with discrete sigmas have such a table
    sigmas = torch.linspace(1, 0, steps + 1)
    return {"x": draw(1, *job.latent), "sigmas": sigmas, "log_sigmas": levels, **prompts}


def program_for(job: Job, steps: int) -> Tensor:
    """Return the job's sampler program for the inputs of `tensors_of`. Call this where tensors have data."""
    from tests.support.programs import (
        FlowSampling,
        VelocitySampling,
        encoded_program,
    )  # import here, after ComfyUI's switches are set

    model_sampling = FlowSampling() if isinstance(job.sampling, FlowSettings) else VelocitySampling()
    return encoded_program(
        job.sampler, torch.linspace(1, 0, steps + 1), torch.empty(1, *job.latent), model_sampling=model_sampling
    )


def request(job: Job, plan: ResolvedPlan, computes_in: str = "bfloat16") -> SampleRequest:
    """Return a denoise request, with a negative prompt if the plan has two branches."""
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
