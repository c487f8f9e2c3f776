"""An exchange with a group of workers: what they are asked, who looks on meanwhile, and their answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ...weights.adapters.lora import NONE, AdapterSet
from ...wire.frames import Frame
from ...wire.to_host import RankCostReply
from ...wire.to_worker import (
    DecodeRequest,
    EncodeRequest,
    ForwardRequest,
    MeasureBlocksRequest,
    MeasureMachineRequest,
    MeasureMemoryRequest,
    ReleaseModelRequest,
    SampleRequest,
)

OnMessage = Callable[[Frame], None]
OnLoading = Callable[[int, int], None]
IsCancelled = Callable[[], bool]

Request = (
    SampleRequest
    | ForwardRequest
    | DecodeRequest
    | EncodeRequest
    | MeasureMachineRequest
    | MeasureMemoryRequest
    | MeasureBlocksRequest
    | ReleaseModelRequest
)


def _ignore(*_: object) -> None:
    """What nobody wants to know."""


def _never() -> bool:
    """What cannot be cancelled."""
    return False


@dataclass(frozen=True)
class RequestContext:
    """Who asks the workers for something.

    Attributes:
        is_cancelled: asked often; True cancels the request.
        on_loading: told the bytes of weights that are there and those there will be; what it raises cancels the request.
    """

    is_cancelled: IsCancelled = _never
    on_loading: OnLoading = _ignore


@dataclass(frozen=True)
class PendingRequest:
    """A request and who looks on.

    Attributes:
        message: the request.
        tensors: what goes with it.
        adapters: those that it names.
        caller: may cancel it, and hears how loading gets on.
        on_message: called with the frames of SampleStepReply and DecodedPixelsReply; an exception from it cancels the request.
    """

    message: Request
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    adapters: AdapterSet = NONE
    caller: RequestContext = RequestContext()
    on_message: OnMessage = _ignore


@dataclass(frozen=True)
class RequestReply:
    """The frame that answers a request and what the request cost on each rank, in no order."""

    frame: Frame
    reports: list[RankCostReply]
