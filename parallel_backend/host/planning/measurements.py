"""What plans are chosen by, as the workers measure it: the machine, the memory that is free, a model's blocks."""

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
    """Measures by a backend's workers; what does not change is kept in the cache folder.

    Args:
        ask: has a request carried out by the workers of its plan.
        number: a new request's.
        on_event: told of what takes a while.
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
        """How fast a plan's devices and their links are, measured now. Raises Cancelled, WorkerFailed, Refused."""
        self._on_event(MeasuringEvent("this machine"))
        request = MeasureMachineRequest(self._number(), _side_by_side(plan))
        message = self._ask(PendingRequest(request, caller=RequestContext(is_cancelled))).frame.message
        assert isinstance(message, MeasureMachineReply)
        return message.machine

    def machine(self, plan: ResolvedPlan, is_cancelled: IsCancelled) -> Machine:
        """The machine's speeds, measured once and kept on disk."""
        key = machine_key(plan.devices, plan.attention)
        return cached(key, Machine, lambda: self.measure(plan, is_cancelled))

    def memory(
        self, plan: ResolvedPlan, reclaimable: Callable[[str], int], is_cancelled: IsCancelled
    ) -> tuple[float, ...]:
        """Bytes that a job may take of each rank's device.

        Args:
            reclaimable: bytes that this process holds on a device of this machine and would give up for the job.
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
        """How long a model's blocks take on a plan's devices, for tensors of an example's shapes."""

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
    """All workers of a plan on one axis, each with everything."""
    return msgspec.structs.replace(
        plan,
        **mesh_degrees(ulysses=plan.world_size),
        patches=1,
        stages=(sum(plan.stages),),
        shares=(1,) * plan.world_size,
        weights="replicated",
    )
