"""Messages from the workers to the host, checked against their schema on arrival. The name of each ends in Reply.

A request has several replies: steps and costs while it runs, and one last reply that ends it. The requests are in
`to_worker.py`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..diffusion import ModelSpec
from ..plan.predict.measure import BlockTimes, Machine
from .message import Message


class RankFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Host, device and versions of a rank. The versions must be the same on all ranks.

    Attributes:
        code: digest of this pack's own code.
        comfyui: version of ComfyUI; empty where the worker was started without a ComfyUI. Some models need one.
        comfyui_files: digests of ComfyUI's files (`models/comfyui/content/files.py`).
        kernel_faults: how installed packages of attention kernels fail on the device, by name.
    """

    host: str
    device: str
    torch: str
    diffusers: str
    code: str
    comfyui: str = ""
    comfyui_files: bytes = b""
    kernel_faults: dict[str, str] = {}


class ConnectReply(Message, frozen=True):
    """The first message of a worker on its connection."""

    generation: int
    facts: RankFacts


class WaitingReply(Message, frozen=True):
    """Some ranks have not connected yet. The gateway sends this to a client.

    Attributes:
        missing: the ranks that have not connected.
        rejection: why a rank was turned away; empty if none was.
    """

    missing: tuple[int, ...]
    rejection: str


class WelcomeReply(Message, frozen=True):
    """The facts of all ranks, in order. The gateway sends this to a new client, which may then join or leave."""

    members: tuple[RankFacts, ...]


class BusyReply(Message, frozen=True):
    """Another client has joined already. The gateway sends this to a client that asks to join."""

    client: str


class JoinReply(Message, frozen=True):
    """The process group is up on this rank. Answers a JoinRequest."""

    generation: int


class RankLostReply(Message, frozen=True):
    """The connection to a rank has ended, and the group with it. The gateway sends this."""

    rank: int
    reason: str


class HeartbeatReply(Message, frozen=True):
    """The current activity of a rank, sent at least once a second.

    Attributes:
        progress: a counter that grows as long as the rank makes progress.
        waiting: True if the rank waits for other ranks now.
    """

    phase: str
    step: int
    progress: int
    waiting: bool


class LoadingReply(Message, frozen=True):
    """Progress of loading weights: `done` of `total` bytes, over all ranks."""

    request: int
    done: int
    total: int


class SampleStepReply(Message, frozen=True):
    """A step of a SampleRequest, sent after the step's first model call. Tensors: `denoised`, `x`."""

    request: int
    step: int


class DecodedPixelsReply(Message, frozen=True):
    """Decoded frames of one item of the batch, from its frame `start` on. The pieces of a DecodeRequest come in order.

    The tensor `pixels` is `[3, (frames,) height, width]`. From another machine the tensor comes with the message. On this
    machine `dtype` and `shape` describe it, and the descriptor of its shared memory comes with the message.
    """

    request: int
    item: int
    start: int
    dtype: str
    shape: tuple[int, ...]


class ModelOnDevice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model and the bytes of its weights on the device of one rank."""

    model: ModelSpec
    nbytes: int


class RankTimings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Times of one request on one rank, all counted in seconds from the arrival of the request there.

    Attributes:
        seconds: duration of the request.
        width: seconds of one bin of `waiting`.
        waiting: microseconds of waiting for other ranks in each bin, by kind of traffic. Empty bins at the end are left out.
        phases: the phases of the request and the start of each.
        steps: the start of each step of the denoise.
    """

    seconds: float
    width: float
    waiting: dict[str, list[int]]
    phases: list[tuple[str, float]]
    steps: list[float]


class RankCostReply(Message, frozen=True):
    """The cost of a request on one rank: seconds, bytes sent by kind, bytes read from disk, and memory.

    Attributes:
        waiting: seconds of waiting for other ranks.
        read: bytes read from disk.
        weights: bytes of the weights of the request's model.
        peak: largest number of bytes on the device during the request.
        models_on_device: all models on the device at the end of the request.
        on_host: bytes of weights that had to leave the device and wait in host memory.
        restored: bytes that came back from host memory during the request.
        compiling: seconds of compiling blocks.
    """

    request: int
    rank: int
    seconds: float
    waiting: float
    sent: dict[str, int]
    read: int
    weights: int
    cache: int
    peak: int
    models_on_device: list[ModelOnDevice]
    on_host: int
    restored: int
    times: RankTimings
    compiling: float = 0.0


class DoneReply(Message, frozen=True):
    """The request is finished. Tensors: `result`, unless the request has none.

    Attributes:
        skipped: number of a denoise's model calls that a cache saved.
        uncompiled: for each kind of block, and for the expansion of GGUF weights, why it was not compiled as requested.
        value: the packed result of an EncodeTextRequest.
    """

    request: int
    skipped: int = 0
    uncompiled: tuple[str, ...] = ()
    value: Any = None


class MeasureMachineReply(Message, frozen=True):
    """The speed of devices and links."""

    request: int
    machine: Machine


class MeasureMemoryReply(Message, frozen=True):
    """The bytes of each rank that are free for a job, with the bytes of weights that the rank would give up."""

    request: int
    free: tuple[int, ...]


class MeasureBlocksReply(Message, frozen=True):
    """The times of the blocks of a model."""

    request: int
    times: BlockTimes


class DeclinedReply(Message, frozen=True):
    """These ranks cannot carry out the request and are idle again. The reason is for the user."""

    request: int
    reason: str


class CancelledReply(Message, frozen=True):
    """The request was cancelled on all ranks, which are idle again."""

    request: int


class MemoryShortage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Memory of a rank's device when it ran out.

    Attributes:
        requested_bytes: size of the allocation that failed; 0 if unknown.
        free_bytes: free memory of the device.
        model_bytes: weights of the request's model on this rank.
        models_on_device: all models whose weights were on the device.
    """

    requested_bytes: int
    free_bytes: int
    model_bytes: int
    models_on_device: list[ModelOnDevice]


class IssuedOperations(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Number of operations of one kind that a rank issued during a request. All of `ranks` have to issue as many."""

    name: str
    ranks: tuple[int, ...]
    count: int


class FailedReply(Message, frozen=True):
    """A rank's own report of its failure.

    Attributes:
        shortage: state of the memory, if the device ran out of it.
        trace: the traceback; empty where `reason` is a sentence for the user.
        failed_at: seconds since the epoch.
        error: type of the exception.
        issued: operations of the request; None where the rank cannot continue, whatever the other ranks report.
    """

    rank: int
    device: str
    phase: str
    step: int
    shortage: MemoryShortage | None
    reason: str
    trace: str
    failed_at: float
    error: str = ""
    issued: list[IssuedOperations] | None = None


ToHost = (
    ConnectReply
    | WaitingReply
    | WelcomeReply
    | BusyReply
    | JoinReply
    | RankLostReply
    | HeartbeatReply
    | LoadingReply
    | SampleStepReply
    | DecodedPixelsReply
    | RankCostReply
    | DoneReply
    | MeasureMachineReply
    | MeasureMemoryReply
    | MeasureBlocksReply
    | DeclinedReply
    | CancelledReply
    | FailedReply
)
