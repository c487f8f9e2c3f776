"""RemoteModel: a model in the workers, with methods to plan and run requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from ...parallel_backend.plan.predict.memory import needs
from ...parallel_backend.plan.predict.profiles import DenoiseJob
from ...parallel_backend.weights.adapters.lora import AdapterSet
from ...parallel_backend.weights.layers.packing import QuantisedMatrices
from ...parallel_backend.wire.frames import Frame
from ..memory.devices import free_devices, reclaimable_bytes
from ..memory.loaded_models import device_name
from ..progress import loading, workflow
from .conditioning import by_mask
from .dtypes import dtype_name
from .features.controlnet import Control, residuals_of
from .features.lora import AdapterReader
from .trials import FunctionVerdicts

OF_A_MODEL = "a text encoder or VAE in too low a precision does that"


@dataclass(frozen=True)
class RemoteModel:
    """A model in the workers, with its requested plan. The workers start and load the model at its first use.

    `unsharded_reason` says why a model whose class has a declaration runs unsharded; it is empty for all others.
    """

    backend: Backend
    family: Family
    config: Any
    spec: ModelSpec
    requested_plan: ParallelPlan
    devices: tuple[str, ...]
    weight_bytes: int
    quantised: QuantisedMatrices
    reader: AdapterReader
    verdicts: FunctionVerdicts = field(default_factory=FunctionVerdicts, compare=False)
    unsharded_reason: str = ""

    def job(self, forward: Conditioning, dtype: torch.dtype, has_uncond: bool, steps: int) -> DenoiseJob:
        """Return the size of a denoise, which the plan depends on.

        Args:
            forward: one forward of one branch, with the longest prompt.
            dtype: the compute dtype.
            has_uncond: True if a negative branch takes part.
            steps: the sampler's number of steps.
        """
        shape = picture_shape(forward.tensors["x"].shape, forward.values)
        job = DenoiseJob(
            image_tokens=self.family.image_tokens(self.config, shape),
            text_tokens=self.family.context_tokens(self.config, forward.tensors),
            batch=max(1, shape[0] // rows_a_unit(forward.values)),
            has_uncond=has_uncond,
            steps=steps,
            element=dtype.itemsize,
            item_bytes=rows_a_unit(forward.values) * self.family.item_bytes(self.config, shape, forward.tensors, dtype),
        )
        return self.with_weights(job)

    def with_weights(self, job: DenoiseJob) -> DenoiseJob:
        """Return a job with the model's weights as they are held and used."""
        return replace(
            job,
            weight_element=self.weight_bytes / self.shape.parameters,
            expansion=self.quantised.moved / self.shape.parameters,
            expanded=self.quantised.largest,
            multiplied=self.quantised.multiplied,
        )

    def plan(
        self, job: DenoiseJob, forward: Conditioning, dtype: torch.dtype, compiler: str = "", all_tokens: bool = False
    ) -> ResolvedPlan:
        """Return the fastest plan for a job that satisfies the requested plan.

        Args:
            job: the size of the denoise.
            forward: one forward of the job.
            dtype: the compute dtype.
            compiler: the backend that the run compiles the blocks with; empty for none.
            all_tokens: True if an attention needs all tokens of its heads at once, which rules out Ring and PipeFusion.

        Raises:
            Refused: no plan satisfies the request.
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
        """Return the model's size and limits."""
        return self.family.shape(self.config)

    def attention(self, dtype: torch.dtype) -> str:
        """Return the workers' attention kernel and the reason for it, for the log.

        For GPUs of another machine, return the plan's choice.

        Raises:
            Refused: the plan's choice cannot run here.
        """
        if self.shape.unsharded:
            return "ComfyUI's own"
        machine, _, device = self.devices[0].rpartition("/")
        if machine and device != "cpu":  # only that machine knows which kernels its GPUs can run
            return self.requested_plan.attention
        kernel = choose_kernel(self.requested_plan.attention, torch.device(device), dtype, self.shape.head_dim)
        return f"{kernel.name} ({kernel.reason})"

    def check(self, latent: Tensor, conditioning: Conditioning) -> None:
        """Raise Refused if the model cannot run with these inputs, or if the conditioning contains NaN or infinity."""
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
        """Raise Refused if a tensor contains NaN or infinity. `remedy` is advice about the node that the tensor comes from."""
        wrong = int((~torch.isfinite(tensor)).sum())
        if wrong:
            raise Refused(
                f"the {what} holds {wrong} values of {tensor.numel()} that are NaN or infinite: "
                f"look at the node it comes from ({remedy})."
            )

    def bytes_on(self, device: torch.device) -> int:
        """Return about how many bytes of weights all workers on a device of this process hold when the weights are loaded."""
        parts = (
            len(self.devices) if self.requested_plan.weights == "sharded" else max(1, self.requested_plan.pipefusion)
        )
        return self.devices.count(device_name(device)) * self.weight_bytes // parts

    def sample(self, tensors: Mapping[str, Tensor], on_progress: Any, adapters: AdapterSet, **fields: Any) -> Frame:
        """Run a denoise; see `Backend.sample`. Cancel in ComfyUI raises ComfyUI's own exception."""
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
        """Unload ComfyUI's models from the plan's devices as far as a job needs the memory.

        Returns:
            The bytes that the job needs besides the model's weights: its working memory, and the networks that each rank holds.
        """
        needed = needs(plan, self.shape, job)
        network_tensors = {
            id for network in adapters.networks for id in (*network.weights.values(), *network.inputs.values())
        }
        working = int(needed.working) + sum(adapters.tensors[id].nbytes for id in network_tensors)
        weight_bytes = needed.weights
        if plan.weights == "streamed":  # the more of the model stays on the device, the faster it runs
            weight_bytes = needs(msgspec.structs.replace(plan, weights="replicated"), self.shape, job).weights
        free_devices(self.backend, self.spec, plan.devices, weight_bytes + working)
        return working

    def coupling(self, call: Conditioning) -> str:
        """Return why the rows of a call influence one another, as the beginning of a sentence; empty if they do not."""
        if recipes := call.values.get(f"{OPTIONS}.{ATTENTION_GUIDANCE}"):
            return f"{decoded(str(recipes))[0].node} compares both prompts in every attention layer"
        if inputs := self.family.couples_rows(self.config, call.tensors):
            return f"the {inputs} of this batch differ, and {self.config.kind} models then mix the rows of the batch"
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
        """Run the model once for each call, and return the outputs.

        Args:
            calls: the inputs of each call.
            dtype: the compute dtype.
            adapters: LoRA and its kin, and the networks.
            plan: the plan of the run.
            working: the result of `free_memory`.
            control: a ControlNet's output for a single call, in the form that ComfyUI gives a model.
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
    """Return the context of the running node: a check for Cancel, a function that shows loading on the node, the workflow."""
    return RequestContext(comfy.model_management.processing_interrupted, loading(), workflow())


def interruption() -> BaseException:
    """Return ComfyUI's exception for Cancel, and clear ComfyUI's flag."""
    try:
        comfy.model_management.throw_exception_if_processing_interrupted()
    except comfy.model_management.InterruptProcessingException as error:
        return error
    return comfy.model_management.InterruptProcessingException()
