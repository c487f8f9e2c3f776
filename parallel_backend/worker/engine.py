"""Carrying out requests on one rank: every rank runs the same code on the same frame."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..denoise import loop
from ..denoise.forward import ParallelForward
from ..denoise.guidance import Guidance
from ..denoise.inpaint import Inpaint
from ..denoise.samplers import Flow, start
from ..errors import Cancelled
from ..mesh import Mesh, build_mesh
from ..models.family import ModelSpec
from ..plan import ResolvedPlan
from ..wire.frames import Frame
from ..wire.messages import Done, Forward, Message, Progress, Release, Sample, Stopped
from .environment import Environment
from .holder import Holder
from .link import Link
from .status import Status
from .world import World


class Engine:
    """One rank's weights and communicators. Only rank 0 answers the host."""

    def __init__(self, environment: Environment, world: World, link: Link, status: Status) -> None:
        self._device = environment.device
        self._world = world
        self._link = link
        self._status = status
        self._holder = Holder(environment.device, status)
        self._meshes: dict[ResolvedPlan, Mesh] = {}

    def carry_out(self, frame: Frame) -> None:
        """Do what a frame asks for and, on rank 0, send the answer."""
        message = frame.message
        tensors = {name: tensor.to(self._device) for name, tensor in frame.tensors.items()}
        with torch.inference_mode():
            match message:
                case Sample():
                    self._sample(message, tensors)
                case Forward():
                    self._forward(message, tensors)
                case Release():
                    self._holder.release()
                    self._answer(Done(message.request, self._holder.held_bytes))
        self._status.enter("idle")

    def _sample(self, message: Sample, tensors: Mapping[str, Tensor]) -> None:
        try:
            result = self._denoise(message, tensors)
        except Cancelled:
            self._answer(Stopped(message.request))
        else:
            self._answer(Done(message.request, self._holder.held_bytes), {"result": result})

    def _denoise(self, message: Sample, tensors: Mapping[str, Tensor]) -> Tensor:
        forward = self._prepare(message.model, message.plan)
        flow = Flow(message.flow.first_sigma, message.flow.noise_scale)
        denoise: loop.Denoise = Guidance(
            forward,
            getattr(torch, message.compute_dtype),
            message.flow.timestep_scale,
            message.cfg,
            message.positive,
            message.negative,
            {name: tensor for name, tensor in tensors.items() if name.startswith("prompt.")},
        )
        if "mask" in tensors:
            denoise = Inpaint(denoise, flow, tensors["mask"], tensors["latent"], tensors["noise"])

        def before_step(step: int) -> None:
            self._status.enter("sampling", step + 1)
            if self._world.agree(self._link.cancelled(message.request)):
                raise Cancelled

        def after_call(step: int, denoised: Tensor, x: Tensor) -> None:
            self._answer(Progress(message.request, step), {"denoised": denoised, "x": x})

        steps = start(
            message.sampler, tensors["x"], tensors["sigmas"], sampling=flow, seed=message.seed, options=message.options
        )
        return loop.run(steps, denoise, before_step, after_call)

    def _forward(self, message: Forward, tensors: Mapping[str, Tensor]) -> None:
        forward = self._prepare(message.model, message.plan)
        self._status.enter("a forward of the model")
        conditioning = {name: tensor for name, tensor in tensors.items() if name not in ("x", "timestep")}
        result = forward(tensors["x"], tensors["timestep"], conditioning)
        self._answer(Done(message.request, self._holder.held_bytes), {"result": result})

    def _prepare(self, spec: ModelSpec, plan: ResolvedPlan) -> ParallelForward:
        model = self._holder.hold(spec)
        if plan not in self._meshes:
            self._status.enter("connecting the workers")
            self._meshes[plan] = build_mesh(plan, self._device)
        return ParallelForward(model, self._meshes[plan], plan.attention, self._status.mark)

    def _answer(self, message: Message, tensors: Mapping[str, Tensor] | None = None) -> None:
        if self._world.rank == 0:
            self._link.send(message, tensors)
