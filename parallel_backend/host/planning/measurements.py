"""The workers' measurements by which plans are chosen: the machine's speeds, the free memory, and a model's blocks."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ...conditioning import Conditioning
from ...diffusion import ModelSpec
from ...mesh_axes import mesh_degrees
from ...plan import ResolvedPlan
from ...plan.predict.measure import BlockTimes, Machine, cached, machine_key
from ...wire.to_host import MeasureBlocksReply, MeasureMachineReply, MeasureMemoryReply
from ...wire.to_worker import MeasureBlocksRequest, MeasureMachineRequest, MeasureMemoryRequest
from ..workers.pending_request import IsCancelled, PendingRequest, RequestContext, RequestReply
from ..workers.remote import is_remote
from .events import MeasuringEvent, OnEvent


class Measurements:
    """Measurements by a backend's workers. Those that do not change are kept in the cache folder.

    Args:
        ask: has a request carried out by the workers of its plan.
        number: returns the number of a new request.
        on_event: receives an event for a measurement that takes a while.
    """

    def __init__(
        self,
        ask: Callable[[PendingRequest], RequestReply],
        number: Callable[[], int],
        on_event: OnEvent,
    ) -> None:
        self._ask = ask
        self._number = number
        self._on_event = on_event

    def measure(self, plan: ResolvedPlan, is_cancelled: IsCancelled) -> Machine:
        """Measure the speeds of a plan's devices and of their links now. Raises Cancelled, WorkerFailed, Refused."""
        self._on_event(MeasuringEvent("this machine"))
        request = MeasureMachineRequest(self._number(), _side_by_side(plan))
        message = self._ask(PendingRequest(request, caller=RequestContext(is_cancelled))).frame.message
        assert isinstance(message, MeasureMachineReply)
        return message.machine

    def machine(self, plan: ResolvedPlan, is_cancelled: IsCancelled) -> Machine:
        """Return the machine's speeds, measured once and kept on disk."""
        key = machine_key(plan.devices, plan.attention)
        return cached(key, Machine, lambda: self.measure(plan, is_cancelled))

    def memory(
        self, plan: ResolvedPlan, reclaimable: Callable[[str], int], is_cancelled: IsCancelled
    ) -> tuple[float, ...]:
        """Return the bytes that a job may use on each rank's device.

        Args:
            reclaimable: returns the bytes that this process holds on a device of this machine and would give up for the job.
        """
        request = MeasureMemoryRequest(self._number(), plan)
        message = self._ask(PendingRequest(request, caller=RequestContext(is_cancelled))).frame.message
        assert isinstance(message, MeasureMemoryReply)
        devices = plan.devices
        return tuple(
            free + (0 if is_remote(device) else reclaimable(device)) / devices.count(device)
            for free, device in zip(message.free, devices, strict=True)
        )

    def blocks(
        self,
        model: ModelSpec,
        plan: ResolvedPlan,
        compute_dtype: str,
        example: Conditioning,
        is_cancelled: IsCancelled,
    ) -> BlockTimes:
        """Return the times of a model's blocks on a plan's devices, for tensors of an example's shapes."""

        def measure() -> BlockTimes:
            self._on_event(MeasuringEvent("the model's blocks"))
            request = MeasureBlocksRequest(
                self._number(), model, _side_by_side(plan), compute_dtype, dict(example.values)
            )
            message = self._ask(
                PendingRequest(request, example.tensors, caller=RequestContext(is_cancelled))
            ).frame.message
            assert isinstance(message, MeasureBlocksReply)
            return message.times

        shapes = {name: tuple(tensor.shape) for name, tensor in sorted(example.tensors.items())}
        key = f"{machine_key(plan.devices, plan.attention)}\n{model}\n{compute_dtype} {shapes} rows tried"
        return cached(key, BlockTimes, measure)


def _side_by_side(plan: ResolvedPlan) -> ResolvedPlan:
    """Return a plan with all workers of the given plan on one axis, each with everything."""
    return msgspec.structs.replace(
        plan,
        **mesh_degrees(ulysses=plan.world_size),
        patches=1,
        stages=(sum(plan.stages),),
        shares=(1,) * plan.world_size,
        weights="replicated",
    )
