"""The gain of a plan over one device: the first steps of the last denoise, timed on both."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
from torch import Tensor

from ...clock import seconds_per_step
from ...diffusion import ModelSpec
from ...errors import Refused
from ...plan import ResolvedPlan
from ...plan.advice import gigabytes
from ...plan.choose import single_device
from ...wire.frames import Frame
from ...wire.to_host import SampleStepReply
from ...wire.to_worker import SampleRequest
from ..workers.pending_request import IsCancelled, PendingRequest, RequestContext, RequestReply
from .planner import MeasuredChoice

STEPS = 6
"""Number of steps that are timed, after the first step and the steps of PipeFusion's warm-up."""

FreeMemory = Callable[[ModelSpec, tuple[str, ...], float], None]
"""Makes other models than the given one leave devices, so that the given number of bytes is free on each."""


class Comparison(msgspec.Struct, frozen=True):
    """The measured and the predicted seconds a step, of a plan and of one device.

    Attributes:
        seconds, alone: measured seconds a step, of the plan and of one device.
        predicted, predicted_alone: predicted seconds a step, of the plan and of one device; 0 on the CPU.
        steps: number of steps that were timed.
        of: number of the job's steps.
        without_adapters: True if the job had adapters, which the comparison leaves out.
    """

    plan: str
    seconds: float
    alone: float
    predicted: float
    predicted_alone: float
    steps: int
    of: int
    without_adapters: bool


@dataclass(frozen=True)
class Denoise:
    """A finished denoise that can be repeated. Its tensors are on the CPU, and its adapters are left out."""

    message: SampleRequest
    tensors: Mapping[str, Tensor]
    chosen: MeasuredChoice | None

    @classmethod
    def of(cls, exchange: PendingRequest, chosen: MeasuredChoice | None) -> Denoise:
        """Return the denoise that a request asked for."""
        assert isinstance(exchange.message, SampleRequest)
        return cls(exchange.message, {name: tensor.cpu() for name, tensor in exchange.tensors.items()}, chosen)


def compare(
    denoise: Denoise | None,
    ask: Callable[[PendingRequest], RequestReply],
    number: Callable[[], int],
    free_memory: FreeMemory,
    report: Callable[[str], None],
    is_cancelled: IsCancelled,
) -> Comparison:
    """Time a denoise's first steps on its plan and on the plan's first device alone. Loading does not count.

    Args:
        ask: has a request carried out.
        number: returns the number of a new request.
        report: receives a text about the current measurement.

    Raises:
        Refused: there is nothing to compare. The message says why.
        Cancelled, WorkerFailed: as Backend.sample does.
    """
    if denoise is None or denoise.chosen is None:
        raise Refused("there is no run to compare: run a graph with Parallel Sampler or KSampler first.")
    plan, choice, memory = denoise.message.plan, denoise.chosen.choice, denoise.chosen.memory
    if plan.world_size == 1:
        raise Refused("the last run was on one device, so there is nothing to compare: choose more in Parallel Plan.")
    single = choice.single.breakdown
    if not single.fits_into(memory):
        raise Refused(
            f"one device cannot hold the last run's job ({gigabytes(single.memory)} needed, {gigabytes(memory[0])} free), so its "
            "time cannot be measured: choose a smaller picture."
        )
    of = len(denoise.tensors["sigmas"]) - 1
    if of < 2:
        raise Refused("the last run had one step, and a comparison needs two: run a graph of two steps.")
    steps = min(of, STEPS + 1 + (plan.warmup_steps if plan.patches > 1 else 0))

    def timed(plan: ResolvedPlan, working_bytes: int) -> float:
        """Return the seconds of a step. The first step, which may load the model, does not count."""
        times: list[float] = []

        def on_message(frame: Frame) -> None:
            if isinstance(frame.message, SampleStepReply):
                times.append(time.monotonic())

        tensors = {**denoise.tensors, "sigmas": denoise.tensors["sigmas"][: steps + 1]}
        message = msgspec.structs.replace(
            denoise.message, request=number(), plan=plan, adapters="", working_bytes=working_bytes
        )
        ask(PendingRequest(message, tensors, caller=RequestContext(is_cancelled), on_message=on_message))
        return seconds_per_step([times])

    report(f"{steps} steps on {plan.degrees}")
    shared = timed(plan, denoise.message.working_bytes)
    alone = single_device(plan)
    report(f"{steps} steps on {alone.devices[0]} alone, once the model is loaded there")
    free_memory(denoise.message.model, alone.devices, single.memory)
    seconds = timed(alone, int(single.memory - single.weights))
    (chosen,) = (entry for entry in choice.ranking if entry.plan == plan)
    return Comparison(
        plan=plan.degrees,
        seconds=shared,
        alone=seconds,
        predicted=chosen.seconds if plan.on_gpus else 0.0,
        predicted_alone=choice.single.seconds if plan.on_gpus else 0.0,
        steps=steps - 1,
        of=of,
        without_adapters=bool(denoise.message.adapters),
    )
