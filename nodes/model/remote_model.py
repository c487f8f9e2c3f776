"""RemoteModel: where the weights of a MODEL are and how to use them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import comfy.model_management
import comfy.utils
import msgspec
import torch
from torch import Tensor

from ...parallel_backend.attention.kernels import choose_kernel
from ...parallel_backend.conditioning import (
    ALONE,
    ATTENTION_GUIDANCE,
    OPTIONS,
    Conditioning,
    packed_shapes,
    picture_shape,
)
from ...parallel_backend.diffusion import ModelSpec
from ...parallel_backend.errors import Cancelled, Refused
from ...parallel_backend.host import Backend
from ...parallel_backend.host.planning.planner import PlanRequest
from ...parallel_backend.host.workers.pending_request import RequestContext
from ...parallel_backend.models.comfyui.features.recipe import decoded
from ...parallel_backend.models.comfyui.rows import rows_a_unit
from ...parallel_backend.models.family import Family
from ...parallel_backend.plan import ModelShape, ParallelPlan, ResolvedPlan, Workload
from ...parallel_backend.plan.predict.cost import DenoiseJob, needs
from ...parallel_backend.weights.adapters.lora import AdapterSet
from ...parallel_backend.weights.layers.packing import Expanded
from ...parallel_backend.wire.frames import Frame
from ..memory.devices import free_devices, reclaimable_bytes
from ..memory.loaded_models import device_name
from ..progress import loading
from .conditioning import by_mask
from .dtypes import dtype_name
from .features.controlnet import Control, residuals_of
from .features.lora import AdapterReader
from .trials import FunctionVerdicts

OF_A_MODEL = "a text encoder or VAE in too low a precision does that"


@dataclass(frozen=True)
class RemoteModel:
    """A model in the workers: what to load, with which plan. Starting takes place when it is first used.

    `unsharded_reason` says why a model whose class has a declaration runs unsharded; it is empty for all others.
    """

    backend: Backend
    family: Family
    config: Any
    spec: ModelSpec
    requested_plan: ParallelPlan
    devices: tuple[str, ...]
    weight_bytes: int
    expanded: Expanded
    reader: AdapterReader
    verdicts: FunctionVerdicts = field(default_factory=FunctionVerdicts, compare=False)
    unsharded_reason: str = ""

    def job(self, forward: Conditioning, dtype: torch.dtype, has_uncond: bool, steps: int) -> DenoiseJob:
        """What is to be computed, as a plan sees it.

        Args:
            forward: one forward of one side, with the longest prompt.
            dtype: the compute dtype.
            two_sided: whether a negative side takes part.
            steps: of the sampler.
        """
        shape = picture_shape(forward.tensors["x"].shape, forward.values)
        return DenoiseJob(
            image_tokens=self.family.image_tokens(self.config, shape),
            text_tokens=self.family.context_tokens(self.config, forward.tensors),
            batch=max(1, shape[0] // rows_a_unit(forward.values)),
            has_uncond=has_uncond,
            steps=steps,
            element=dtype.itemsize,
            weight_element=self.weight_bytes / self.shape.parameters,
            expansion=self.expanded.moved / self.shape.parameters,
            expanded=self.expanded.largest,
            item_bytes=rows_a_unit(forward.values) * self.family.item_bytes(self.config, shape, forward.tensors, dtype),
        )

    def plan(
        self, job: DenoiseJob, forward: Conditioning, dtype: torch.dtype, compiler: str = "", all_tokens: bool = False
    ) -> ResolvedPlan:
        """The plan for a job and one forward of it: the fastest that does what is wished for.

        Args:
            compiler: what the run asks the workers to compile blocks with; empty for nothing.
            all_tokens: whether an attention needs all tokens of its heads at once, so that there is neither Ring nor PipeFusion.

        Raises:
            Refused: the wish cannot be met.
        """
        rows = self.family.token_rows(self.config, tuple(forward.tensors["x"].shape))
        workload = Workload(job.batch, job.has_uncond, rows)
        requested_plan = self.backend.placed_on_devices(self.requested_plan)
        question = PlanRequest(
            msgspec.structs.replace(requested_plan, ring=1, pipefusion=1) if all_tokens else requested_plan,
            torch.cuda.device_count(),
            self.spec,
            self.shape,
            workload,
            job,
            compiler,
            ALONE in forward.values,
        )
        try:
            return self.backend.plan(
                question,
                dtype_name(dtype),
                forward,
                reclaimable_bytes,
                comfy.model_management.processing_interrupted,
            )
        except Cancelled:
            raise interruption() from None

    @property
    def shape(self) -> ModelShape:
        """The model's size and limits."""
        return self.family.shape(self.config)

    def attention(self, dtype: torch.dtype) -> str:
        """The attention kernel that the workers will use and why, for the log; of GPUs elsewhere, what is asked for.

        Raises:
            Refused: the plan's choice cannot run here.
        """
        if self.shape.unsharded:
            return "ComfyUI's own"
        machine, _, device = self.devices[0].rpartition("/")
        if machine and device != "cpu":  # what they can run only they know
            return self.requested_plan.attention
        kernel = choose_kernel(self.requested_plan.attention, torch.device(device), dtype, self.shape.head_dim)
        return f"{kernel.name} ({kernel.reason})"

    def check(self, latent: Tensor, conditioning: Conditioning) -> None:
        """Raise Refused where the model cannot take these inputs, or where the conditioning holds NaN."""
        tensors, values = conditioning.tensors, conditioning.values
        picture = comfy.utils.unpack_latents(latent, packed_shapes(values))[0]
        self.family.check(self.config, picture, tensors, values)
        conditioning_names = self.family.conditioning_names
        names = {name.partition(".")[0] for name in (*tensors, *values)} - {OPTIONS}
        if conditioning_names is not None and (unknown := sorted(names - conditioning_names)):
            raise Refused(
                f"{', '.join(unknown)} in the conditioning cannot be used with this parallel MODEL: remove the node that adds "
                "it, or use Load Diffusion Model."
            )
        for name, tensor in tensors.items():
            self.check_numbers(f"conditioning ({name})", tensor)

    def check_numbers(self, what: str, tensor: Tensor, remedy: str = OF_A_MODEL) -> None:
        """Raise Refused where a tensor holds NaN or infinity; `remedy` is what to do at the node that it comes from."""
        wrong = int((~torch.isfinite(tensor)).sum())
        if wrong:
            raise Refused(
                f"the {what} holds {wrong} values of {tensor.numel()} that are NaN or infinite: "
                f"look at the node it comes from ({remedy})."
            )

    def bytes_on(self, device: torch.device) -> int:
        """About how many bytes of weights all workers on a device of this process hold, once they are loaded."""
        parts = (
            len(self.devices) if self.requested_plan.weights == "sharded" else max(1, self.requested_plan.pipefusion)
        )
        return self.devices.count(device_name(device)) * self.weight_bytes // parts

    def sample(self, tensors: Mapping[str, Tensor], on_progress: Any, adapters: AdapterSet, **fields: Any) -> Frame:
        """Run a denoise; see Backend.sample. ComfyUI's Cancel ends it as ComfyUI expects."""
        try:
            answer = self.backend.sample(
                tensors,
                on_progress,
                caller(),
                adapters,
                model=self.spec,
                **fields,
            )
        except Cancelled:
            raise interruption() from None
        return answer.frame

    def free_memory(self, plan: ResolvedPlan, job: DenoiseJob, adapters: AdapterSet) -> int:
        """Make ComfyUI's models leave the plan's devices as far as a job needs it.

        Returns what it needs beside the model's weights: what it computes with, and the networks that each rank holds.
        """
        needed = needs(plan, self.shape, job)
        network_tensors = {
            id for network in adapters.networks for id in (*network.weights.values(), *network.inputs.values())
        }
        working = int(needed.working) + sum(adapters.tensors[id].nbytes for id in network_tensors)
        weight_bytes = needed.weights
        if plan.weights == "streamed":  # the more of it stays on the device, the faster
            weight_bytes = needs(msgspec.structs.replace(plan, weights="replicated"), self.shape, job).weights
        free_devices(self.backend, self.spec, plan.devices, weight_bytes + working)
        return working

    def coupling(self, call: Conditioning) -> str:
        """Return why the rows of a call influence one another, as the beginning of a sentence; empty if they do not."""
        if recipes := call.values.get(f"{OPTIONS}.{ATTENTION_GUIDANCE}"):
            return f"{decoded(str(recipes))[0].node} compares both prompts in every attention"
        if inputs := self.family.couples_rows(self.config, call.tensors):
            return (
                f"the {inputs} of this batch differ, and {self.config.kind} models compute such rows from one another"
            )
        return ""

    def forward(
        self,
        calls: Sequence[Conditioning],
        dtype: torch.dtype,
        adapters: AdapterSet,
        plan: ResolvedPlan,
        working: int,
        control: Control | None = None,
    ) -> list[Tensor]:
        """Run the model once for each call, in a compute dtype.

        Args:
            working: what `free_memory` found.
            control: a ControlNet's output for a single call, as ComfyUI hands it to a model.
        """
        shape = picture_shape(calls[0].tensors["x"].shape, calls[0].values)
        size = shape[0], self.family.image_tokens(self.config, shape), self.shape.hidden
        residuals = residuals_of(control, self.family.control_blocks(self.config), size) if control else None
        parts = [part for call in calls for part in by_mask(call)]
        try:
            answer = self.backend.forward(
                parts,
                caller(),
                adapters,
                residuals,
                model=self.spec,
                plan=plan,
                compute_dtype=dtype_name(dtype),
                working_bytes=working,
                couples_rows=any(map(self.coupling, parts)),
            )
        except Cancelled:
            raise interruption() from None
        sizes = [call.tensors["x"].shape[0] for call in calls]
        return list(answer.frame.tensors["result"].split(sizes))


def caller() -> RequestContext:
    """The node that is executed: ComfyUI's Cancel, and a line that says how loading gets on."""
    return RequestContext(comfy.model_management.processing_interrupted, loading())


def interruption() -> BaseException:
    """ComfyUI's exception for Cancel, its flag cleared."""
    try:
        comfy.model_management.throw_exception_if_processing_interrupted()
    except comfy.model_management.InterruptProcessingException as error:
        return error
    return comfy.model_management.InterruptProcessingException()
