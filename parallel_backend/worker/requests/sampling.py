"""A denoise whose loop runs in the worker, on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from ...denoise.guidance import Guidance
from ...denoise.model_calls import ModelCalls
from ...denoise.noise import LatentNoise, SharedNoise
from ...denoise.patch_sampler import Inpaint, PatchSampler
from ...denoise.pipeline import Callbacks, CancelSignal, Patch, Pipeline
from ...denoise.process import process_of
from ...denoise.prompts import Prompts
from ...denoise.replay import DeviceProgram, script_of
from ...denoise.step_cache import step_cache
from ...errors import Cancelled, Refused
from ...layout import length
from ...mesh import Mesh
from ...models.comfyui.features.recipe import function_from
from ...models.comfyui.rows import parts_of
from ...models.inputs import Region
from ...wire.to_host import DeclinedReply, DoneReply, SampleStepReply
from ...wire.to_worker import PROGRAM, SampleRequest
from .previews import Previews
from .rank import Prepared, WorkerRank


def sample(rank: WorkerRank, message: SampleRequest, tensors: dict[str, Tensor]) -> None:
    """Run a denoise. Reply with each step's prediction of the final latent, and with the final latent.

    Args:
        tensors: the tensors of the request. The prompts' tensors are removed from the dict, so that they do not stay in memory
            in fp32 next to their casts.
    """
    x, sigmas = tensors["x"], tensors["sigmas"]
    try:
        script = script_of(tensors.pop(PROGRAM), x.ndim, len(sigmas), x.device)
    except Refused as reason:  # every rank raises the same error
        if rank.group.rank == 0:
            rank.host.send(DeclinedReply(message.request, str(reason)))
        return
    mesh = rank.mesh(message.plan)
    try:
        prepared = rank.prepare(message, mesh)
        started = rank.start()
        sender = Previews(rank.device, rank.host.send) if mesh.replies_to_host else nullcontext()
        with sender as previews, rank.keeping():
            run = _SamplingRun(rank, message, tensors, prepared, previews, script)
            answer = run.whole(run.pipeline().run())
    except Cancelled:
        rank.cancelled(message, mesh.replies_to_host)
        return
    forward = prepared.forward
    rank.report(message.request, message.model, started, forward.cache_bytes, forward.compiling())
    if mesh.replies_to_host:
        uncompiled = (*forward.uncompiled(), *rank.expansion.warnings())
        rank.host.send(DoneReply(message.request, run.skipped, uncompiled), answer)


class _SamplingRun:
    """The run of one request on this rank."""

    def __init__(
        self,
        rank: WorkerRank,
        message: SampleRequest,
        tensors: dict[str, Tensor],
        prepared: Prepared,
        previews: Previews | None,
        script: DeviceProgram,
    ) -> None:
        self._rank = rank
        self._message = message
        self._tensors = tensors
        self._mesh = mesh = rank.mesh(message.plan)
        self._previews = previews
        self._script = script
        self._x = tensors["x"]
        self._runs = parts_of(message.plan, self._x.shape[0], message.positive[0].values)
        self._process = process_of(message.sampling, tensors)
        self._regions = prepared.model.patches(self._x.shape, message.plan.patches)
        prompts = _prompts(message, tensors, mesh)
        functions = [function_from(recipe) for recipe in message.guidance_functions]
        self._cache = step_cache(message.cache, prompts, mesh, rank.broadcast_flag)
        self._model = ModelCalls(
            forward=prepared.forward,
            access=prepared.access,
            prompts=prompts,
            guidance=Guidance(self._process, message.cfg, prompts.mine, mesh.cfg, functions),
            process=self._process,
            sigmas=tensors["sigmas"].to("cpu", torch.float32),
            cache=self._cache,
            dtype=getattr(torch, message.compute_dtype),
            meter=rank.meter,
        )

    @property
    def skipped(self) -> int:
        """Return the number of model calls that the step cache has replaced."""
        return self._cache.skipped

    def whole(self, result: Tensor | None) -> dict[str, Tensor]:
        """Return the tensors of the reply; an empty dict on ranks without a part in it. A collective over the data axis."""
        if result is None or not _answers(self._mesh):
            return {}
        return {"result": _whole_batch(result, self._mesh, self._runs)}

    def pipeline(self) -> Pipeline:
        """Return the denoise loop of this request, with its samplers and callbacks."""
        rank, message, mesh = self._rank, self._message, self._mesh
        rows = self._runs[mesh.data.rank]
        return Pipeline(
            mesh=mesh,
            model=self._model,
            calls=self._script.calls(),
            patches=[Patch(region, self._sampler(region, rows)) for region in self._regions],
            latent=self._x[rows],
            warmup_steps=message.plan.warmup_steps,
            callbacks=Callbacks(
                cancelled=CancelSignal(is_requested=self._cancelled, broadcast_flag=rank.broadcast_flag),
                step_begins=self._step_begins,
                step_done=self._step_done,
            ),
        )

    def _sampler(self, region: Region, rows: slice) -> PatchSampler:
        batch = self._x.shape[0]

        def view(tensor: Tensor) -> Tensor:
            return region.of(tensor if tensor.shape[0] == 1 < batch else tensor[rows])

        inpaint = Inpaint.of(self._tensors, self._process, view, self._message.clean_inpaint)
        shape = self._x.shape
        noise = LatentNoise(tuple(shape), self._x.device, SharedNoise(self._mesh, shape, self._runs, region))
        return PatchSampler(self._script, view(self._x), noise, inpaint)

    def _cancelled(self) -> bool:
        return self._rank.host.cancelled(self._message.request)

    def _step_begins(self, step: int) -> None:
        self._rank.status.enter("sampling", step + 1)

    def _step_done(self, step: int, denoised: Tensor, x: Tensor) -> None:
        if not _answers(self._mesh):
            return
        latents = {"denoised": denoised, "x": x}
        whole = {name: _whole_batch(part, self._mesh, self._runs) for name, part in latents.items()}
        if self._previews is not None:
            self._previews.show(SampleStepReply(self._message.request, step), whole)


def _answers(mesh: Mesh) -> bool:
    """Return True if the reply contains this rank's latents, for its part of the batch."""
    return mesh.is_last_stage and mesh.cfg.rank == 0 and mesh.sequence.rank == 0


def _whole_batch(latent: Tensor, mesh: Mesh, rows: Sequence[slice]) -> Tensor:
    """Return the latents of all data ranks, joined along the batch. A collective over the data axis.

    Args:
        rows: the rows of the batch that each data rank holds.
    """
    sizes = [length(run) for run in rows]
    joined = mesh.data.all_gather(latent.reshape(1, latent.shape[0], -1), sizes)
    return joined.view(sum(sizes), *latent.shape[1:])


def _prompts(message: SampleRequest, tensors: dict[str, Tensor], mesh: Mesh) -> Prompts:
    branches = {0: message.positive} if message.negative is None else {0: message.positive, 1: message.negative}
    mine = list(branches) if mesh.cfg.size == 1 else [mesh.cfg.rank]
    batch = tensors["x"].shape[0]
    rows = parts_of(message.plan, batch, message.positive[0].values)[mesh.data.rank]
    own = {name: tensors.pop(name) for name in list(tensors) if name.startswith("prompt.")}
    return Prompts(branches, mine, own, getattr(torch, message.compute_dtype), batch, rows)
