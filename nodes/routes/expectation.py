"""What the next run of a loader should come to, once file, plan and size are known.

No worker is started for it; but the run is likely to come, so that what workers are forked from begins with its imports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import folder_paths
import msgspec
import node_helpers
import torch
from aiohttp import web

from ...parallel_backend.errors import PlanRefused, Refused
from ...parallel_backend.host.planning.device_memory import DeviceMemory, device_memory
from ...parallel_backend.host.planning.planner import PlanRequest
from ...parallel_backend.host.runs.expectation import expect, in_words, measured_before
from ...parallel_backend.host.workers.status import GroupStatus
from ...parallel_backend.plan import ParallelPlan, Workload
from ...parallel_backend.plan.predict.cost import DenoiseJob
from ...parallel_backend.plan.presets import AUTOMATIC, PRESETS, with_preset
from ..load_checkpoint import LoadParallelCheckpoint
from ..load_cogvideox import LoadParallelCogVideoX
from ..load_diffusion_model import LoadParallelDiffusionModel
from ..load_flux import LoadParallelFlux
from ..load_pixart import LoadParallelPixArt
from ..memory.devices import reclaimable_bytes
from ..model.build import load_model
from ..model.conditioning_files import text_tokens
from ..model.files import CHECKPOINTS, path_of
from ..runtime import backend
from .body import Count, Name, check_name
from .route import as_json

LOADERS = {
    each.__name__: each
    for each in (LoadParallelDiffusionModel, LoadParallelFlux, LoadParallelCogVideoX, LoadParallelPixArt)
}

REMOTE = "tcp://"

SHORT = 16
"""Tokens of a prompt of a few words; how many a usual one has is a model's own."""


class PlanInputs(ParallelPlan, frozen=True, forbid_unknown_fields=True):
    """The inputs of a Parallel Plan."""

    preset: str = AUTOMATIC

    def __post_init__(self) -> None:
        """Refuse a preset that there is not."""
        if self.preset not in PRESETS:
            raise ValueError(f"{self.preset!r} is no preset: use one of {', '.join(PRESETS)}")


class ExpectationRequest(msgspec.Struct, frozen=True):
    """A loader's kind and file, the inputs of its Parallel Plan or what the settings say, and what is to be sampled.

    `width` and `height` are pixels, `length` video frames; `has_uncond` says whether a negative prompt takes part. `steps` is 0
    where they are not known, `compute` is what Model Compute Dtype says, empty where there is none, and `prompts` are the files
    of Load Conditioning, empty where a prompt comes from elsewhere.
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
        """Refuse files outside of ComfyUI's folders."""
        for name in (self.file, *self.prompts):
            check_name(name, inside=True)


class ExpectationReply(msgspec.Struct, frozen=True):
    """A line for the tab, empty where nothing can be said, and a shorter one for the loader.

    `refused` says that the first is why the plan cannot run.
    """

    said: str
    sign: str = ""
    refused: bool = False


def tell_expectation(asked: ExpectationRequest) -> web.Response:
    """One loader's."""
    return as_json(_answer(asked))


def _answer(asked: ExpectationRequest) -> ExpectationReply:
    try:
        fields = {name: getattr(asked.plan, name) for name in ParallelPlan.__struct_fields__}
        requested_plan = with_preset(asked.plan.preset, ParallelPlan(**fields))
        return (
            ExpectationReply("")
            if requested_plan.devices.strip().startswith(REMOTE)
            else _expected(asked, requested_plan)
        )
    except PlanRefused as refusal:
        return ExpectationReply(str(refusal), refused=True)
    except (Refused, FileNotFoundError):  # a graph that is being made
        return ExpectationReply("")


def _expected(asked: ExpectationRequest, requested_plan: ParallelPlan) -> ExpectationReply:
    """Raises PlanRefused where the run would be, and Refused where the file is none that the loader takes."""
    if asked.kind == LoadParallelCheckpoint.__name__:
        path = folder_paths.get_full_path_or_raise(CHECKPOINTS, asked.file)
        patcher = load_model(backend(), LoadParallelDiffusionModel.FAMILY, path, asked.weight_dtype, requested_plan)
    elif loader := LOADERS.get(asked.kind):
        patcher = load_model(
            backend(), loader.FAMILY, path_of(asked.file), asked.weight_dtype, requested_plan, loader.KINDS
        )
    else:
        return ExpectationReply("")
    model, remote = patcher.model, patcher.model.diffusion_model.remote
    latent = _latent(asked, model.latent_format)
    shape = remote.shape
    compute = node_helpers.string_to_torch_dtype(asked.compute) or getattr(torch, remote.spec.compute)
    job = DenoiseJob(
        image_tokens=remote.family.image_tokens(remote.config, latent),
        text_tokens=max(map(text_tokens, asked.prompts), default=shape.text),
        batch=asked.batch,
        has_uncond=asked.has_uncond,
        steps=asked.steps or DenoiseJob.steps,
        element=compute.itemsize,
        weight_element=remote.weight_bytes / shape.parameters,
        expansion=remote.expanded.moved / shape.parameters,
        expanded=remote.expanded.largest,
    )
    workload = Workload(asked.batch, asked.has_uncond, remote.family.token_rows(remote.config, latent))
    question = PlanRequest(
        backend().placed_on_devices(requested_plan), torch.cuda.device_count(), remote.spec, shape, workload, job
    )
    groups = backend().status().groups
    devices = [_with_ours(each, groups) for each in device_memory()]
    try:
        expected = expect(question, devices, measured_before)
    except PlanRefused:
        if not model.diffusion_model.may_be_spread:
            raise
        return ExpectationReply("")
    if not asked.prompts:  # their length is known once they are encoded
        short = replace(question, job=replace(job, text_tokens=SHORT))
        expected = expected.or_else(expect(short, devices, measured_before))
    line = in_words(expected)
    if any(expected.devices == tuple(rank.device for rank in group.ranks) for group in groups):
        return ExpectationReply(line, sign=line)
    backend().prepare()
    return ExpectationReply(f"{line}; the first run starts workers", sign=f"{line}; not started")


def _latent(asked: ExpectationRequest, form: Any) -> tuple[int, ...]:
    """The shape of what would be sampled."""
    side = form.spacial_downscale_ratio
    place = (-(-asked.height // side), -(-asked.width // side))
    frames = () if form.latent_dimensions < 3 else ((asked.length - 1) // form.temporal_downscale_ratio + 1,)
    return (asked.batch, form.latent_channels, *frames, *place)


def _with_ours(memory: DeviceMemory, groups: Sequence[GroupStatus]) -> DeviceMemory:
    """A device with what would make way for the run counted as free: what workers hold, and ComfyUI's models."""
    if memory.free is None:
        return memory
    ranks = [rank for group in groups for rank in group.ranks if rank.device == memory.device]
    held = sum(model.nbytes for rank in ranks for model in rank.held)
    free = min(memory.total, memory.free + held + reclaimable_bytes(memory.device))
    return msgspec.structs.replace(memory, free=free)
