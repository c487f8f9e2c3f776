"""The expected time and memory of a loader's next run, given its file, plan and size.

No worker starts for the prediction. But the run is likely to come, so the fork server of the workers starts its imports.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import folder_paths
import msgspec
import node_helpers
import torch
from aiohttp import web

from ...parallel_backend.errors import PlanRefused, Refused
from ...parallel_backend.host.planning.planner import PlanRequest
from ...parallel_backend.host.runs.expectation import expect, in_words, measured_before
from ...parallel_backend.plan import ParallelPlan, Workload
from ...parallel_backend.plan.plan import AUTOMATIC, PRESETS, with_preset
from ...parallel_backend.plan.predict.profiles import DenoiseJob
from ..load_checkpoint import LoadParallelCheckpoint
from ..load_model import LoadParallelCogVideoX, LoadParallelDiffusionModel, LoadParallelFlux, LoadParallelPixArt
from ..memory.devices import available_memory
from ..model.build import load_model
from ..model.conditioning_files import text_tokens
from ..model.files import CHECKPOINTS, path_of
from ..runtime import backend
from .body import Count, Name, check_name
from .route import as_json

LOADERS = {
    loader.__name__: loader
    for loader in (LoadParallelDiffusionModel, LoadParallelFlux, LoadParallelCogVideoX, LoadParallelPixArt)
}

REMOTE = "tcp://"

SHORT = 16
"""Tokens of a short prompt, for a lower estimate. Each model has its own number of tokens of a usual prompt."""


class PlanInputs(ParallelPlan, frozen=True, forbid_unknown_fields=True):
    """The inputs of a Parallel Plan."""

    preset: str = AUTOMATIC

    def __post_init__(self) -> None:
        """Raise ValueError for an unknown preset."""
        if self.preset not in PRESETS:
            raise ValueError(f"{self.preset!r} is not a preset: use one of {', '.join(PRESETS)}")


class ExpectationRequest(msgspec.Struct, frozen=True):
    """A loader's node class and file, its plan, and the size of the run.

    Attributes:
        kind, file: the loader's node class and its model file.
        width, height: pixels.
        plan: the inputs of its Parallel Plan, or the plan of the settings.
        length: video frames.
        batch: rows of the batch.
        has_uncond: True if a negative prompt takes part.
        weight_dtype: the loader's choice.
        steps: the sampler's steps; 0 if unknown.
        compute: the choice of Model Compute Dtype; empty without that node.
        prompts: the files of Load Conditioning; empty if the prompts come from other nodes.
    """

    kind: Name
    file: Name
    width: Count
    height: Count
    plan: PlanInputs
    length: Count = 1
    batch: Count = 1
    has_uncond: bool = msgspec.field(default=False, name="two_sided")
    weight_dtype: Name = "default"
    steps: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0
    compute: Name = ""
    prompts: Annotated[tuple[Name, ...], msgspec.Meta(max_length=16)] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for files outside of ComfyUI's folders."""
        for name in (self.file, *self.prompts):
            check_name(name, inside=True)


class ExpectationReply(msgspec.Struct, frozen=True):
    """A line for the tab, empty if nothing can be predicted, and shorter lines for the loader node and for a message.

    If `refused` is true, the first line is the reason why the plan cannot run.
    """

    said: str
    sign: str = ""
    brief: str = ""
    refused: bool = False


def tell_expectation(request: ExpectationRequest) -> web.Response:
    """Reply to a loader's request with the prediction of its run."""
    return as_json(_answer(request))


def _answer(request: ExpectationRequest) -> ExpectationReply:
    try:
        fields = {name: getattr(request.plan, name) for name in ParallelPlan.__struct_fields__}
        requested_plan = with_preset(request.plan.preset, ParallelPlan(**fields))
        return (
            ExpectationReply("")
            if requested_plan.devices.strip().startswith(REMOTE)
            else _expected(request, requested_plan)
        )
    except PlanRefused as refusal:
        return ExpectationReply(str(refusal), refused=True)
    except (Refused, FileNotFoundError):  # the user is still building the graph
        return ExpectationReply("")


def _expected(request: ExpectationRequest, requested_plan: ParallelPlan) -> ExpectationReply:
    """Predict a run of the requested model under the requested plan.

    Raises:
        PlanRefused: the plan cannot run.
        Refused: the loader does not accept the file.
    """
    if request.kind == LoadParallelCheckpoint.__name__:
        path = folder_paths.get_full_path_or_raise(CHECKPOINTS, request.file)
        patcher = load_model(backend(), LoadParallelDiffusionModel.FAMILY, path, request.weight_dtype, requested_plan)
    elif loader := LOADERS.get(request.kind):
        patcher = load_model(
            backend(), loader.FAMILY, path_of(request.file), request.weight_dtype, requested_plan, loader.KINDS
        )
    else:
        return ExpectationReply("")
    model, remote = patcher.model, patcher.model.diffusion_model.remote
    latent = _latent(request, model.latent_format)
    shape = remote.shape
    compute = node_helpers.string_to_torch_dtype(request.compute) or getattr(torch, remote.spec.compute)
    job = DenoiseJob(
        image_tokens=remote.family.image_tokens(remote.config, latent),
        text_tokens=max(map(text_tokens, request.prompts), default=shape.text),
        batch=request.batch,
        has_uncond=request.has_uncond,
        steps=request.steps or DenoiseJob.steps,
        element=compute.itemsize,
    )
    job = remote.with_weights(job)
    workload = Workload(request.batch, request.has_uncond, remote.family.token_rows(remote.config, latent))
    question = PlanRequest(
        backend().placed_on_devices(requested_plan), torch.cuda.device_count(), remote.spec, shape, workload, job
    )
    groups = backend().status().groups
    devices = available_memory(groups)
    try:
        expected = expect(question, devices, measured_before)
    except PlanRefused:
        if not model.diffusion_model.may_be_parallelised:
            raise
        return ExpectationReply("")
    if not request.prompts:  # the prompts' length is unknown before they are encoded
        short = replace(question, job=replace(job, text_tokens=SHORT))
        expected = expected.or_else(expect(short, devices, measured_before))
    line, brief = in_words(expected), in_words(expected, brief=True)
    if any(expected.devices == tuple(rank.device for rank in group.ranks) for group in groups):
        return ExpectationReply(line, sign=line, brief=brief)
    backend().prepare()
    return ExpectationReply(f"{line}; the first run starts workers", sign=f"{line}; workers not started", brief=brief)


def _latent(request: ExpectationRequest, form: Any) -> tuple[int, ...]:
    """Return the shape of the latent that the run would sample."""
    scale = form.spacial_downscale_ratio
    size = (-(-request.height // scale), -(-request.width // scale))
    frames = () if form.latent_dimensions < 3 else ((request.length - 1) // form.temporal_downscale_ratio + 1,)
    return (request.batch, form.latent_channels, *frames, *size)
