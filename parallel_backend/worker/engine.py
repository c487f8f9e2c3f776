"""Carrying out requests on one rank: every rank runs the same code on the same frame."""

from __future__ import annotations

import hashlib
import resource
import time
from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor

from ..comm.meter import Meter
from ..denoise.guidance import Guidance
from ..denoise.patch_sampler import Inpaint, PatchSampler
from ..denoise.pipeline import Pipeline, StopSignal
from ..denoise.prompts import Prompts
from ..denoise.samplers import Steps, process_of, start
from ..denoise.schedule import schedule
from ..denoise.stage import Inputs, StageForward
from ..errors import Cancelled, Refused
from ..layout import cut, length
from ..mesh import Mesh, build_mesh
from ..models import FAMILIES
from ..models.family import Model, ModelSpec, Patch
from ..plan import ResolvedPlan
from ..plan.measure import BlockTimes, measure
from ..weights.checkpoint import read_header
from ..weights.patching import Keep
from ..weights.reading import Watch
from ..wire.frames import Frame
from ..wire.messages import (
    RESIDUAL,
    Adapters,
    BlocksMeasured,
    Declined,
    Decode,
    Done,
    Encode,
    Forward,
    HeldModel,
    Loading,
    MachineMeasured,
    MeasureBlocks,
    MeasureMachine,
    Message,
    Progress,
    Release,
    Report,
    Sample,
    Shortage,
    Stopped,
)
from .adapters import AdapterStore
from .autoencoding import AutoencoderPart, Autoencoding
from .environment import Environment
from .files import ModelFiles
from .holder import Holder
from .link import Link
from .measuring import time_blocks
from .memory import Allowance, Memory, asked_bytes, is_out_of_memory
from .residuals import distribute, shares
from .stage_part import STORAGE_DTYPES, StagePart, stages
from .status import Status
from .world import World

GIGABYTE = 10**9

LOADING_SECONDS = 0.2
"""Time between two reports of how far loading has got."""


class Engine:
    """One rank's weights and communicators. One rank alone answers the host: the first of the last stage."""

    def __init__(self, environment: Environment, world: World, link: Link, status: Status, meter: Meter) -> None:
        self._device = environment.device
        self._world = world
        self._link = link
        self._status = status
        self._meter = meter
        self._neighbours = world.neighbours(meter)
        machines = self._neighbours.machines
        self._memory = Memory(environment.device, machines.count(machines[world.rank]))
        self._holder = Holder(self._memory, world.all_agree, status)
        self._adapters = AdapterStore()
        self._autoencoding = Autoencoding(environment.device, world, link, status, meter)
        self._mesh_of: tuple[ResolvedPlan, Mesh] | None = None
        self._read = 0
        self._files = ModelFiles(environment.models)
        self._agreed: tuple[ResolvedPlan, ModelSpec] | None = None

    @torch.no_grad()
    def carry_out(self, frame: Frame) -> None:
        """Do what a frame asks for and answer."""
        message = frame.message
        self._holder.restored = self._read = 0
        if isinstance(message, Sample | Forward | Decode | Encode | MeasureBlocks) and not self._agree(message):
            self._status.enter("idle")
            return
        if isinstance(message, (Decode, Encode)):
            self._autoencode(message, frame.tensors)
        elif isinstance(message, Adapters):
            self._adapters.learn(message, frame.tensors)
        else:
            inputs = {name: tensor for name, tensor in frame.tensors.items() if not name.startswith(RESIDUAL)}
            residuals = {name: tensor for name, tensor in frame.tensors.items() if name not in inputs}
            self._compute(message, {name: tensor.to(self._device) for name, tensor in inputs.items()}, residuals)
        if self._meter.trace is not None:
            self._meter.trace.write()
        self._memory.trim()
        self._status.enter("idle")

    def _compute(self, message: Message, tensors: dict[str, Tensor], residuals: Mapping[str, Tensor]) -> None:
        match message:
            case Sample():
                self._sample(message, tensors)
            case Forward():
                self._single_forward(message, tensors, residuals)
            case MeasureMachine():
                self._measure_machine(message)
            case MeasureBlocks():
                self._measure_blocks(message, tensors)
            case Release():
                started = self._begin()
                self._holder.release(message.model)
                self._report(message.request, message.model, started)
                if self._world.rank == 0:
                    self._link.send(Done(message.request))

    def _agree(self, message: Sample | Forward | Decode | Encode | MeasureBlocks) -> bool:
        """Whether all ranks are about to do the same and have the model's file; if not, rank 0 tells the host.

        A collective, for each new plan or model.
        """
        wanted = message.plan, message.model
        if self._agreed == wanted:
            return True
        self._status.enter("comparing plan and model")
        digest = hashlib.sha256(msgspec.msgpack.encode(wanted)).hexdigest()[:16]
        problem = ""
        try:
            self._files.find(message.model)
        except Refused as refusal:
            problem = str(refusal)
        said = [each.split(" ", 1) for each in self._world.gather(f"{digest} {problem}")]
        for rank, (theirs, their_problem) in enumerate(said):
            if theirs != said[0][0]:
                their_problem = f"its plan and model are {theirs} and rank 0's {said[0][0]}."
            if their_problem:
                if self._world.rank == 0:
                    self._link.send(Declined(message.request, f"Worker {rank} of {len(said)}: {their_problem}"))
                return False
        self._agreed = wanted
        return True

    def shortage(self, error: BaseException) -> Shortage | None:
        """What there was when memory ran out; None for an error of another kind."""
        if not is_out_of_memory(error):
            return None
        free = self._holder.free()
        return Shortage(asked_bytes(error), free, self._holder.wanted, self._held_models())

    def forget(self) -> None:
        """Drop the adapters that a host has sent: another one does not know of them."""
        self._adapters = AdapterStore()

    def _sample(self, message: Sample, tensors: Mapping[str, Tensor]) -> None:
        mesh = self._mesh(message.plan)
        try:
            model, forward = self._prepare(message, mesh)
            started = self._begin()
            result = self._pipeline(message, tensors, mesh, model, forward).run()
        except Cancelled:
            self._stopped(message, mesh.reports)
            return
        self._report(message.request, message.model, started, forward.cache_bytes)
        if result is not None and _answers(mesh):
            whole = _whole_batch(result, mesh, tensors["x"].shape[0])
            if mesh.reports:
                self._link.send(Done(message.request), {"result": whole})

    def _pipeline(
        self, message: Sample, tensors: Mapping[str, Tensor], mesh: Mesh, model: Model, forward: StageForward
    ) -> Pipeline:
        plan, x = message.plan, tensors["x"]
        batch = x.shape[0]
        rows = cut(batch, plan.data)[mesh.data.rank]
        process = process_of(message.sampling, tensors)
        patches = model.patches(x.shape, plan.patches)
        dtype: torch.dtype = getattr(torch, message.compute_dtype)
        sides = {0: message.positive} if message.negative is None else {0: message.positive, 1: message.negative}
        mine = list(sides) if plan.cfg == 1 else [mesh.cfg.rank]
        prompt_tensors = {name: tensor for name, tensor in tensors.items() if name.startswith("prompt.")}

        def begin(latent: Tensor, patch: Patch | None) -> Steps:
            return start(
                message.sampler,
                latent,
                tensors["sigmas"],
                process=process,
                seed=message.seed,
                options=message.options,
                latent_shape=tuple(x.shape) if patch else (0,),
                view=(lambda drawn: patch.of(drawn[rows])) if patch else (lambda drawn: drawn),
            )

        def sampler(patch: Patch) -> PatchSampler:
            def view(tensor: Tensor) -> Tensor:
                return patch.of(tensor if tensor.shape[0] == 1 < batch else tensor[rows])

            return PatchSampler(begin(view(x), patch), Inpaint.of(tensors, process, view))

        def on_call(step: int, denoised: Tensor, x: Tensor) -> None:
            if _answers(mesh):
                shown = {name: _whole_batch(t, mesh, batch) for name, t in (("denoised", denoised), ("x", x))}
                if mesh.reports:
                    self._link.send(Progress(message.request, step), shown)

        return Pipeline(
            mesh=mesh,
            forward=forward,
            prompts=Prompts(sides, mine, prompt_tensors, dtype, batch, rows),
            guidance=Guidance(process, message.cfg, mine, mesh.cfg),
            calls=schedule(lambda nothing: begin(nothing, None)),
            patches=patches,
            samplers=[sampler(patch) for patch in patches],
            latent=x[rows],
            process=process,
            warmup_steps=plan.warmup_steps,
            dtype=dtype,
            stop=StopSignal(
                asked=lambda: self._link.cancelled(message.request),
                agree=self._world.agree,
                enter=lambda step: self._status.enter("sampling", step + 1),
            ),
            on_call=on_call,
            meter=self._meter,
        )

    def _single_forward(self, message: Forward, tensors: Mapping[str, Tensor], residuals: Mapping[str, Tensor]) -> None:
        """One forward of the whole sequence for each call; calls, or the batch of one, are spread over data and cfg.

        `residuals` are on the CPU of rank 0.
        """
        mesh = self._mesh(message.plan)
        try:
            model, forward = self._prepare(message, mesh)
        except Cancelled:
            self._stopped(message, mesh.reports)
            return
        started = self._begin()
        self._status.enter("running the model once")
        groups = mesh.data.size * mesh.cfg.size
        pieces = _pieces(message.calls, tensors, groups)
        parts = cut(len(pieces), groups) if len(pieces) > 1 else [slice(0, 1)] * groups
        mine = pieces[parts[mesh.data.rank * mesh.cfg.size + mesh.cfg.rank]]
        added: dict[int, Tensor] = {}
        if message.residuals is not None:
            rows = cut(tensors["0.x"].shape[0], len(pieces))
            layout = forward.layout(mine[0]["x"].shape, mine[0])
            each = shares(message.residuals, message.plan, stages(message.plan), layout, rows)
            found = distribute(self._neighbours.everyone, each, residuals, message.residuals, model.features)
            added = {block: tensor.to(self._device) for block, tensor in found.items()}
        outputs = [self._forward_piece(piece, forward, added) for piece in mine]
        mesh.pipefusion.finish_sending()
        output = None
        if mesh.last:
            output = torch.cat([tensors["0.x"][:0], *(one for one in outputs if one is not None)])
            if len(pieces) > 1:
                output = _from_groups(output, [sum(p["x"].shape[0] for p in pieces[part]) for part in parts], mesh)
        self._report(message.request, message.model, started, forward.cache_bytes)
        if mesh.reports:
            assert output is not None
            self._link.send(Done(message.request), {"result": output})

    def _autoencode(self, message: Decode | Encode, tensors: Mapping[str, Tensor]) -> None:
        """Decode or encode a batch; each rank takes its rows of the tensors, which are on the CPU, to its device."""
        watch = self._watch(message.request, self._world.rank == 0)
        answer = {}
        try:
            part = self._holder.hold(
                message.model,
                None,
                lambda: AutoencoderPart(self._files.find(message.model), self._device, self._neighbours, watch),
                self._allowance(message.plan),
            )
            started = self._begin()
            if isinstance(message, Decode):
                self._autoencoding.decode(message, tensors["latent"], part.autoencoder)
            else:
                answer = {"latent": self._autoencoding.encode(message, tensors["pixels"], part.autoencoder)}
        except Cancelled:
            self._stopped(message, self._world.rank == 0)
            return
        self._report(message.request, message.model, started)
        if self._world.rank == 0:
            self._link.send(Done(message.request), answer)

    def _forward_piece(
        self, tensors: Mapping[str, Tensor], forward: StageForward, residuals: Mapping[int, Tensor]
    ) -> Tensor | None:
        conditioning = {name: tensor for name, tensor in tensors.items() if name not in ("x", "timestep")}
        x, timestep = tensors["x"], tensors["timestep"]
        return forward(Inputs("single", x.shape, x.dtype, self._device, timestep, conditioning, residuals), x, None)

    def _measure_machine(self, message: MeasureMachine) -> None:
        mesh = self._mesh(message.plan)
        self._status.enter("measuring devices and links")
        machine = measure(self._device, mesh.ulysses)
        if mesh.reports:
            self._link.send(MachineMeasured(message.request, machine))

    def _measure_blocks(self, message: MeasureBlocks, tensors: dict[str, Tensor]) -> None:
        mesh = self._mesh(message.plan)
        self._status.enter("timing the model's blocks")
        spec = self._files.find(message.model)
        family = FAMILIES[spec.family]
        _, config = family.inspect(read_header(spec.path))
        dtype = STORAGE_DTYPES[spec.dtype]
        seconds, counts = time_blocks(family, config, message.plan, self._device, dtype, tensors)
        local = torch.tensor(seconds, device=self._device)[None, :, None]
        everyone = mesh.ulysses.gather(local, [len(counts)] * mesh.ulysses.size).view(-1, len(counts))
        if mesh.reports:
            times = BlockTimes(tuple(tuple(rank) for rank in everyone.tolist()), counts)
            self._link.send(BlocksMeasured(message.request, times))

    def _mesh(self, plan: ResolvedPlan) -> Mesh:
        """The communicators of a plan; those of the plan before are closed."""
        if self._mesh_of is None or self._mesh_of[0] != plan:
            self._status.enter("connecting the workers")
            if self._mesh_of is not None:
                self._mesh_of[1].close()
            self._mesh_of = plan, build_mesh(plan, self._device, self._meter)
        return self._mesh_of[1]

    def _allowance(self, plan: ResolvedPlan, working: int = 0) -> Allowance:
        sharers = plan.devices.count(plan.devices[self._world.rank])
        return Allowance(int(plan.memory_limit * GIGABYTE) // sharers, working, sharers)

    def _prepare(self, message: Sample | Forward, mesh: Mesh) -> tuple[Model, StageForward]:
        """This rank's part of the model, loaded if need be. Raises Cancelled, on all ranks alike, while loading."""
        spec, plan = message.model, message.plan
        stage_of, sharded = stages(plan), plan.weights == "sharded"
        watch = self._watch(message.request, mesh.reports)

        def build() -> StagePart:
            stage = stage_of[self._world.rank]
            keep = Keep(self._memory.has_host_room, self._world.all_agree)
            found = self._files.find(spec)
            return StagePart(found, stage, sharded, self._device, self._meter, self._neighbours, watch, keep)

        part = self._holder.hold(spec, (stage_of, sharded), build, self._allowance(plan, message.working))
        self._status.enter("applying adapters")
        part.adapt(self._adapters.named(message.adapters), watch)
        return part.model, StageForward(part.model, mesh, plan, part.holding, self._status.mark)

    def _watch(self, request: int, reports: bool) -> Watch:
        told = 0.0

        def progress(done: int, total: int) -> None:
            nonlocal told
            self._status.mark()
            if reports and (done == total or time.monotonic() - told > LOADING_SECONDS):
                told = time.monotonic()
                self._link.send(Loading(request, done, total))

        def read(nbytes: int) -> None:
            self._read += nbytes

        return Watch(lambda: self._world.agree(self._link.cancelled(request)), progress, read)

    def _stopped(self, message: Sample | Forward | Decode | Encode, answers: bool) -> None:
        """Answer a request that was cancelled."""
        self._report(message.request, message.model, time.perf_counter())
        if answers:
            self._link.send(Stopped(message.request))

    def _held_models(self) -> list[HeldModel]:
        return [HeldModel(spec, nbytes) for spec, nbytes in self._holder.on_device().items()]

    def _begin(self) -> float:
        self._meter.reset()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        return time.perf_counter()

    def _report(self, request: int, model: ModelSpec, started: float, cache: int = 0) -> None:
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        report = Report(
            request=request,
            rank=self._world.rank,
            seconds=time.perf_counter() - started,
            waiting=self._meter.waiting,
            sent=dict(self._meter.sent),
            read=self._read,
            weights=self._holder.on_device().get(model, 0),
            cache=cache,
            peak=peak,
            held=self._held_models(),
            on_host=sum(self._holder.on_host().values()),
            restored=self._holder.restored,
        )
        self._link.send(report)


def _pieces(calls: int, tensors: Mapping[str, Tensor], groups: int) -> list[dict[str, Tensor]]:
    """The tensors of each call; of a single one with a large enough batch, those of a run of its rows for each group."""
    found = [
        {name.removeprefix(f"{call}."): tensor for name, tensor in tensors.items() if name.startswith(f"{call}.")}
        for call in range(calls)
    ]
    batch = found[0]["x"].shape[0]
    if calls > 1 or batch < groups:
        return found
    return [{name: tensor[rows] for name, tensor in found[0].items()} for rows in cut(batch, groups)]


def _from_groups(local: Tensor, counts: list[int], mesh: Mesh) -> Tensor:
    """What each group of the data and cfg axes has, `counts` rows, joined in their order. A collective."""
    cfg = mesh.cfg.size
    inner = counts[mesh.data.rank * cfg : (mesh.data.rank + 1) * cfg]
    joined = mesh.cfg.gather(local.flatten(1)[None], inner)
    outer = [sum(counts[group * cfg : (group + 1) * cfg]) for group in range(mesh.data.size)]
    return mesh.data.gather(joined, outer).view(sum(counts), *local.shape[1:])


def _answers(mesh: Mesh) -> bool:
    """Whether this rank's latents are those that are answered with, for its part of the batch."""
    return mesh.last and mesh.cfg.rank == 0 and mesh.sequence.rank == 0


def _whole_batch(latent: Tensor, mesh: Mesh, batch: int) -> Tensor:
    """All data ranks' latents, joined along the batch. A collective over the data axis."""
    sizes = [length(run) for run in cut(batch, mesh.data.size)]
    return mesh.data.gather(latent.reshape(1, latent.shape[0], -1), sizes).view(batch, *latent.shape[1:])
