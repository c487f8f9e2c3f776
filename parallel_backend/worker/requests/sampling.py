"""A whole denoise on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import Tensor

from ...denoise.guidance import Guidance
from ...denoise.led import Ask, LedDenoise, answers, whole_batch
from ...denoise.model_calls import ModelCalls
from ...denoise.patch_sampler import Inpaint, PatchSampler
from ...denoise.pipeline import CancelSignal, Pipeline
from ...denoise.prompts import Prompts
from ...denoise.samplers import Steps, process_of, start
from ...denoise.samplers.noise import whole
from ...denoise.schedule import schedule
from ...denoise.shared_noise import SharedNoise
from ...denoise.step_cache import StepCache, step_cache
from ...errors import Cancelled
from ...mesh import Mesh
from ...models.comfyui.features.guidance import guide_function
from ...models.comfyui.rows import parts_of
from ...models.comfyui.sampler import SamplerFunction
from ...models.family import Forward as ModelForward
from ...models.family import Model
from ...models.region import Region
from ...weights.stores.holding import Holding
from ...wire.messages import Done, Progress, Sample
from .previews import Previews
from .rank import Rank


def sample(rank: Rank, message: Sample, tensors: dict[str, Tensor]) -> None:
    """Answer with the final latent, and with what every step believes it to be.

    Args:
        tensors: the prompts' are taken out: they are not kept in fp32 beside what they are cast to.
    """
    mesh = rank.mesh(message.plan)
    try:
        model, forward, holding = rank.prepare(message, mesh)
        function = _function(rank, message, mesh)
        started = rank.start()
        shown = Previews(rank.device, rank.link.send) if mesh.reports else nullcontext()
        with shown as previews, rank.keeping():
            prompts = _prompts(message, tensors, mesh)
            cache = step_cache(message.cache, prompts, mesh, rank.agree)
            run = _Run(rank, message, tensors, mesh, model, forward, holding, prompts, cache, previews)
            answer = run.whole(run.pipeline().run()) if message.stock is None else run.led(function)
    except Cancelled:
        rank.cancelled(message, mesh.reports)
        return
    rank.report(message.request, message.model, started, forward.cache_bytes)
    if mesh.reports:
        uncompiled = (*forward.uncompiled(), *rank.expansion.told())
        rank.link.send(Done(message.request, cache.skipped, uncompiled), answer)


def _function(rank: Rank, message: Sample, mesh: Mesh) -> SamplerFunction | None:
    """ComfyUI's own sampler, on the rank that leads."""
    if message.stock is None or not mesh.reports:
        return None
    rank.status.enter("importing ComfyUI's samplers")
    return SamplerFunction(message.sampler, message.options, message.stock, message.sampling, message.seed, message.cfg)


class _Run:
    """One request on this rank."""

    def __init__(
        self,
        rank: Rank,
        message: Sample,
        tensors: Mapping[str, Tensor],
        mesh: Mesh,
        model: Model,
        forward: ModelForward,
        holding: Holding,
        prompts: Prompts,
        cache: StepCache,
        previews: Previews | None,
    ) -> None:
        self._rank = rank
        self._message = message
        self._tensors = tensors
        self._mesh = mesh
        self._previews = previews
        self._x = tensors["x"]
        self._runs = parts_of(message.plan, self._x.shape[0], message.positive[0].values)
        self._process = process_of(message.sampling, tensors)
        guides = [guide_function(guide) for guide in message.guides]
        self._guidance = Guidance(self._process, message.cfg, prompts.mine, mesh.cfg, guides)
        self._patches = model.patches(self._x.shape, message.plan.patches)
        self._model = ModelCalls(
            forward=forward,
            holding=holding,
            prompts=prompts,
            process=self._process,
            sigmas=tensors["sigmas"].to("cpu", torch.float32),
            cache=cache,
            dtype=getattr(torch, message.compute_dtype),
            meter=rank.meter,
        )

    def whole(self, result: Tensor | None) -> dict[str, Tensor]:
        """The answer, on the rank that answers the host."""
        if result is None or not answers(self._mesh):
            return {}
        return {"result": whole_batch(result, self._mesh, self._runs)}

    def pipeline(self) -> Pipeline:
        """The loop of the backend's own samplers."""
        rank, message, mesh = self._rank, self._message, self._mesh
        rows = self._runs[mesh.data.rank]
        return Pipeline(
            mesh=mesh,
            model=self._model,
            guidance=self._guidance,
            calls=schedule(lambda nothing: self._begin(nothing, None)),
            patches=self._patches,
            samplers=[self._sampler(patch, rows) for patch in self._patches],
            latent=self._x[rows],
            warmup_steps=message.plan.warmup_steps,
            cancelled=CancelSignal(asked=self._cancelled, agree=rank.agree),
            enter=self._enter,
            on_call=self._on_call,
        )

    def led(self, function: SamplerFunction | None) -> dict[str, Tensor]:
        """The answer of ComfyUI's own sampler, on the rank that leads."""
        (whole,) = self._patches
        sigmas = self._tensors["sigmas"].clone()

        def sampler(ask: Ask) -> Tensor:
            assert function is not None
            masked = Inpaint.of(self._tensors, self._process, lambda tensor: tensor, self._message.clean_inpaint)
            return function(ask, masked, self._x, sigmas, self._show)

        result = LedDenoise(
            mesh=self._mesh,
            model=self._model,
            guidance=self._guidance,
            shape=self._x.shape,
            rows=self._runs,
            whole=whole,
            cancelled=self._cancelled,
            enter=self._enter,
        ).run(sampler)
        return {} if result is None else {"result": result, "sigmas": sigmas}

    def _begin(self, latent: Tensor, patch: Region | None) -> Steps:
        message, shape = self._message, self._x.shape
        return start(
            message.sampler,
            latent,
            self._tensors["sigmas"],
            process=self._process,
            seed=message.seed,
            options=message.options,
            latent_shape=tuple(shape) if patch else (0,),
            share=SharedNoise(self._mesh, shape, self._runs, patch) if patch else whole,
        )

    def _sampler(self, patch: Region, rows: slice) -> PatchSampler:
        batch = self._x.shape[0]

        def view(tensor: Tensor) -> Tensor:
            return patch.of(tensor if tensor.shape[0] == 1 < batch else tensor[rows])

        inpaint = Inpaint.of(self._tensors, self._process, view, self._message.clean_inpaint)
        return PatchSampler(self._begin(view(self._x), patch), inpaint)

    def _cancelled(self) -> bool:
        return self._rank.link.cancelled(self._message.request)

    def _enter(self, step: int) -> None:
        self._rank.status.enter("sampling", step + 1)

    def _on_call(self, step: int, denoised: Tensor, x: Tensor) -> None:
        if answers(self._mesh):
            self._show(step, *(whole_batch(part, self._mesh, self._runs) for part in (denoised, x)))

    def _show(self, step: int, denoised: Tensor, x: Tensor) -> None:
        if self._previews is not None:
            self._previews.show(Progress(self._message.request, step), {"denoised": denoised, "x": x})


def _prompts(message: Sample, tensors: dict[str, Tensor], mesh: Mesh) -> Prompts:
    sides = {0: message.positive} if message.negative is None else {0: message.positive, 1: message.negative}
    mine = list(sides) if mesh.cfg.size == 1 else [mesh.cfg.rank]
    batch = tensors["x"].shape[0]
    rows = parts_of(message.plan, batch, message.positive[0].values)[mesh.data.rank]
    own = {name: tensors.pop(name) for name in list(tensors) if name.startswith("prompt.")}
    return Prompts(sides, mine, own, getattr(torch, message.compute_dtype), batch, rows)
