"""The execution of requests on one rank. Every rank runs the same code on the same frame."""

from __future__ import annotations

import hashlib
import re
import socket
from collections.abc import Mapping

import msgspec
import torch
import torch.distributed as dist

from ...attention.kernels import refused_kernels, warm_up_kernels
from ...diffusion import ModelSpec
from ...errors import Refused
from ...plan import ResolvedPlan
from ...wire.frames import Frame
from ...wire.to_host import DeclinedReply, DoneReply
from ...wire.to_worker import (
    PROGRAM,
    RESIDUAL,
    DecodeRequest,
    EncodeRequest,
    EncodeTextRequest,
    ForwardRequest,
    MeasureBlocksRequest,
    MeasureMachineRequest,
    MeasureMemoryRequest,
    ReleaseModelRequest,
    RunRequest,
    SampleRequest,
    StoreAdaptersRequest,
)
from ..memory.files import ModelFiles
from ..memory.rank_memory import is_out_of_memory
from ..process.process_group import ProcessGroup
from ..process.status import CONNECTING, RankProgress
from .autoencoding import Autoencoding
from .measuring import measure_blocks, measure_machine, measure_memory
from .rank import WorkerRank
from .sampling import sample
from .single_forward import single_forward
from .text_encoding import encode_text

DEVICE_ERRORS = re.compile(
    r"CUDA (?:driver )?error|cuda runtime error|Cuda failure|device-side assert|(?:CUBLAS|CUDNN|CUSPARSE)_STATUS|NCCL",
    re.IGNORECASE,
)
"""Messages of errors after which a device may be unusable."""

OfModel = RunRequest | MeasureBlocksRequest
"""Requests that run a model. Their data may make the model raise an error."""


class Engine:
    """The dispatcher of requests to the functions that carry them out, once all ranks agree on the request."""

    def __init__(self, rank: WorkerRank) -> None:
        self._rank = rank
        self._autoencoding = Autoencoding(rank)
        warm_up_kernels(rank.device)
        self._agreement = Agreement(rank.group, rank.files, rank.status, refused_kernels(rank.device))

    @torch.inference_mode()
    def execute(self, frame: Frame) -> None:
        """Carry out the request of a frame and reply."""
        rank, message = self._rank, frame.message
        rank.begin()
        if isinstance(message, OfModel) and self._declines(message):
            rank.status.enter("idle")
            return
        match message:
            case DecodeRequest() | EncodeRequest():
                self._autoencoding.execute(message, frame.tensors)
            case EncodeTextRequest():
                encode_text(rank, message, frame.tensors)
            case StoreAdaptersRequest():
                rank.adapters.learn(message, frame.tensors)
            case ReleaseModelRequest():
                self._release(message)
            case MeasureMachineRequest():
                measure_machine(rank, message)
            case MeasureMemoryRequest():
                measure_memory(rank, message)
            case MeasureBlocksRequest() | SampleRequest() | ForwardRequest():
                self._compute(message, frame)
        if rank.meter.trace is not None:
            rank.meter.trace.write()
        rank.memory.trim()
        rank.status.enter("idle")

    def can_recover(self, frame: Frame, error: Exception) -> bool:
        """Return True if this rank can recover after an error that all other ranks raise too.

        Return False for errors of memory, a device, the operating system or a connection.
        """
        failed = is_out_of_memory(error) or isinstance(error, OSError | dist.DistError)
        if failed or DEVICE_ERRORS.search(str(error)) or self._rank.status.phase == CONNECTING:
            return False
        return isinstance(frame.message, OfModel)

    def recover(self, frame: Frame) -> None:
        """Recover from an error that every rank raised. A collective."""
        assert isinstance(frame.message, OfModel)
        self._rank.recover(frame.message)

    def _compute(self, message: MeasureBlocksRequest | SampleRequest | ForwardRequest, frame: Frame) -> None:
        """Run the model. Move all tensors to the device except the program and residuals, which a rank needs only in part."""
        rank = self._rank
        residuals = {name: tensor for name, tensor in frame.tensors.items() if name.startswith(RESIDUAL)}
        tensors = {
            name: tensor if name == PROGRAM else tensor.to(rank.device)
            for name, tensor in frame.tensors.items()
            if name not in residuals
        }
        match message:
            case SampleRequest():
                sample(rank, message, tensors)
            case ForwardRequest():
                single_forward(rank, message, tensors, residuals)
            case MeasureBlocksRequest():
                measure_blocks(rank, message, tensors)

    def _release(self, message: ReleaseModelRequest) -> None:
        rank = self._rank
        started = rank.start()
        rank.holder.release(message.model, here=rank.group.rank in message.ranks)
        rank.report(message.request, message.model, started)
        if rank.group.rank == 0:
            rank.host.send(DoneReply(message.request))

    def _declines(self, message: OfModel) -> bool:
        """Return True if the ranks cannot run this request together. Rank 0 then sends the reason to the host."""
        rank = self._rank
        problem = self._agreement.problem(message.plan, message.model)
        if problem and rank.group.rank == 0:
            rank.host.send(DeclinedReply(message.request, problem))
        return bool(problem)


class Agreement:
    """A check that all ranks have the same plan and model and can run them. It remembers the last agreement.

    Args:
        refusals: the reasons why kernels of attention do not run on this rank, by the name that a plan has for them.
    """

    def __init__(
        self, group: ProcessGroup, files: ModelFiles, status: RankProgress, refusals: Mapping[str, str]
    ) -> None:
        self._group = group
        self._files = files
        self._status = status
        self._refusals = refusals
        self._agreed: tuple[ResolvedPlan, ModelSpec] | None = None

    def problem(self, plan: ResolvedPlan, model: ModelSpec) -> str:
        """Return the reason why the ranks cannot run this together; empty if they can. All ranks return the same text.

        A collective, unless the ranks agreed on this plan and model last.
        """
        current = plan, model
        if self._agreed == current:
            return ""
        self._status.enter("comparing plan and model")
        digest = hashlib.sha256(msgspec.msgpack.encode(current)).hexdigest()[:16]
        entries = [
            text.split(" ", 2)
            for text in self._group.all_gather_text(f"{digest} {socket.gethostname()} {self._lack(plan, model)}")
        ]
        expected, first, _ = entries[0]
        for rank, (theirs, host, their_lack) in enumerate(entries):
            if theirs != expected:
                return (
                    f"Worker {rank} of {len(entries)} on {host} received plan and model {theirs} and worker 0 on "
                    f"{first} received {expected}: restart the workers."
                )
            if their_lack:
                return f"Worker {rank} of {len(entries)}: {their_lack}"
        self._agreed = current
        return ""

    def _lack(self, plan: ResolvedPlan, model: ModelSpec) -> str:
        """Return a sentence about what this rank lacks for a plan; empty if it lacks nothing."""
        if plan.stages and plan.attention in self._refusals:  # a plan without stages (VAE) runs with any kernel
            return self._refusals[plan.attention]
        try:
            self._files.find(model)
        except Refused as refusal:
            return str(refusal)
        return ""
