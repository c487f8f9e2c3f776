"""A request to a group of workers: its message, its caller, and its reply."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ...weights.adapters.lora import NONE, AdapterSet
from ...wire.frames import Frame
from ...wire.to_host import RankCostReply
from ...wire.to_worker import (
    MeasureBlocksRequest,
    MeasureMachineRequest,
    MeasureMemoryRequest,
    ReleaseModelRequest,
    RunRequest,
)

OnMessage = Callable[[Frame], None]
OnLoading = Callable[[int, int], None]
IsCancelled = Callable[[], bool]

Request = RunRequest | MeasureMachineRequest | MeasureMemoryRequest | MeasureBlocksRequest | ReleaseModelRequest


def _ignore(*_: object) -> None:
    """Ignore the arguments."""


def _never() -> bool:
    """Return False: the request cannot be cancelled."""
    return False


@dataclass(frozen=True)
class RequestContext:
    """The caller of a request to the workers.

    Attributes:
        is_cancelled: called often. True cancels the request.
        on_loading: called with the bytes of weights that have arrived and those that will arrive. An exception from it cancels
            the request.
        workflow: the id of the workflow that the request belongs to; empty if unknown.
    """

    is_cancelled: IsCancelled = _never
    on_loading: OnLoading = _ignore
    workflow: str = ""


@dataclass(frozen=True)
class PendingRequest:
    """A request and its caller.

    Attributes:
        message: the request.
        tensors: the request's tensors, by name.
        adapters: the adapters that the request names.
        caller: may cancel the request, and watches the progress of loading.
        on_message: called with the frames of SampleStepReply and DecodedPixelsReply. An exception from it cancels the request.
    """

    message: Request
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    adapters: AdapterSet = NONE
    caller: RequestContext = RequestContext()
    on_message: OnMessage = _ignore


@dataclass(frozen=True)
class RequestReply:
    """The frame that answers a request, and the request's costs on each rank, in no order."""

    frame: Frame
    reports: list[RankCostReply]
