"""A whole denoise on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import Tensor

from ...denoise.guidance import Guidance
from ...denoise.patch_sampler import Inpaint, PatchSampler
from ...denoise.pipeline import Pipeline, RunsStage, StopSignal
from ...denoise.prompts import Prompts
from ...denoise.samplers import Steps, process_of, start
from ...denoise.samplers.noise import whole
from ...denoise.schedule import schedule
from ...denoise.shared_noise import SharedNoise
from ...denoise.step_cache import StepCache, step_cache
from ...errors import Cancelled
from ...layout import cut, length
from ...mesh import Mesh
from ...models.family import Model
from ...models.region import Region
from ...wire.messages import Done, Progress, Sample
from .previews import Previews
from .rank import Rank


def sample(rank: Rank, message: Sample, tensors: Mapping[str, Tensor]) -> None:
    """Answer with the final latent, and with what every step believes it to be."""
    mesh = rank.mesh(message.plan)
    try:
        model, forward = rank.prepare(message, mesh)
        started = rank.start()
        with Previews(rank.device, rank.link.send) if mesh.reports else nullcontext() as previews:
            prompts = _prompts(message, tensors, mesh)
            cache = step_cache(message.cache, prompts, mesh, rank.agree)
            result = _pipeline(rank, message, tensors, mesh, model, forward, prompts, cache, previews).run()
    except Cancelled:
        rank.stopped(message, mesh.reports)
        return
    rank.report(message.request, message.model, started, forward.cache_bytes)
    if result is not None and _answers(mesh):
        whole = _whole_batch(result, mesh, tensors["x"].shape[0])
        if mesh.reports:
            rank.link.send(Done(message.request, cache.skipped, forward.uncompiled()), {"result": whole})


def _pipeline(
    rank: Rank,
    message: Sample,
    tensors: Mapping[str, Tensor],
    mesh: Mesh,
    model: Model,
    forward: RunsStage,
    prompts: Prompts,
    cache: StepCache,
    previews: Previews | None,
) -> Pipeline:
    plan, x = message.plan, tensors["x"]
    batch = x.shape[0]
    runs = cut(batch, plan.data)
    rows = runs[mesh.data.rank]
    process = process_of(message.sampling, tensors)
    patches = model.patches(x.shape, plan.patches)
    dtype: torch.dtype = getattr(torch, message.compute_dtype)

    def begin(latent: Tensor, patch: Region | None) -> Steps:
        return start(
            message.sampler,
            latent,
            tensors["sigmas"],
            process=process,
            seed=message.seed,
            options=message.options,
            latent_shape=tuple(x.shape) if patch else (0,),
            share=SharedNoise(mesh, x.shape, runs, patch) if patch else whole,
        )

    def sampler(patch: Region) -> PatchSampler:
        def view(tensor: Tensor) -> Tensor:
            return patch.of(tensor if tensor.shape[0] == 1 < batch else tensor[rows])

        return PatchSampler(begin(view(x), patch), Inpaint.of(tensors, process, view, message.clean_inpaint))

    def on_call(step: int, denoised: Tensor, x: Tensor) -> None:
        if _answers(mesh):
            shown = {name: _whole_batch(t, mesh, batch) for name, t in (("denoised", denoised), ("x", x))}
            if previews is not None:
                previews.show(Progress(message.request, step), shown)

    return Pipeline(
        mesh=mesh,
        forward=forward,
        prompts=prompts,
        guidance=Guidance(process, message.cfg, prompts.mine, mesh.cfg),
        calls=schedule(lambda nothing: begin(nothing, None)),
        patches=patches,
        samplers=[sampler(patch) for patch in patches],
        latent=x[rows],
        sigmas=tensors["sigmas"].to("cpu", torch.float32),
        process=process,
        cache=cache,
        warmup_steps=plan.warmup_steps,
        dtype=dtype,
        stop=StopSignal(
            asked=lambda: rank.link.cancelled(message.request),
            agree=rank.agree,
            enter=lambda step: rank.status.enter("sampling", step + 1),
        ),
        on_call=on_call,
        meter=rank.meter,
    )


def _prompts(message: Sample, tensors: Mapping[str, Tensor], mesh: Mesh) -> Prompts:
    sides = {0: message.positive} if message.negative is None else {0: message.positive, 1: message.negative}
    mine = list(sides) if mesh.cfg.size == 1 else [mesh.cfg.rank]
    batch = tensors["x"].shape[0]
    rows = cut(batch, mesh.data.size)[mesh.data.rank]
    own = {name: tensor for name, tensor in tensors.items() if name.startswith("prompt.")}
    return Prompts(sides, mine, own, getattr(torch, message.compute_dtype), batch, rows)


def _answers(mesh: Mesh) -> bool:
    """Whether this rank's latents are those that are answered with, for its part of the batch."""
    return mesh.last and mesh.cfg.rank == 0 and mesh.sequence.rank == 0


def _whole_batch(latent: Tensor, mesh: Mesh, batch: int) -> Tensor:
    """All data ranks' latents, joined along the batch. A collective over the data axis."""
    sizes = [length(run) for run in cut(batch, mesh.data.size)]
    return mesh.data.gather(latent.reshape(1, latent.shape[0], -1), sizes).view(batch, *latent.shape[1:])
