"""Carrying out requests on one rank: every rank runs the same code on the same frame."""

from __future__ import annotations

import re

import torch
import torch.distributed as dist

from ...attention.kernels import refused_kernels, warm_up_kernels
from ...wire.frames import Frame
from ...wire.messages import (
    PROGRAM,
    RESIDUAL,
    Adapters,
    Declined,
    Decode,
    Done,
    Encode,
    Forward,
    MeasureBlocks,
    MeasureMachine,
    MeasureMemory,
    Release,
    Sample,
)
from ..memory.rank_memory import is_out_of_memory
from ..process.status import CONNECTING
from .agreement import Agreement
from .autoencoding import Autoencoding
from .measuring import measure_blocks, measure_machine, measure_memory
from .rank import Rank
from .sampling import sample
from .single_forward import single_forward

DEVICE_ERRORS = re.compile(
    r"CUDA (?:driver )?error|cuda runtime error|Cuda failure|device-side assert|(?:CUBLAS|CUDNN|CUSPARSE)_STATUS|NCCL",
    re.IGNORECASE,
)
"""Messages of errors after which a device may compute nothing more."""

OfModel = Sample | Forward | Decode | Encode | MeasureBlocks
"""Requests that run a model, whose data may make it raise."""


class Engine:
    """Gives each request to what carries it out, once all ranks agree on it."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._autoencoding = Autoencoding(rank)
        warm_up_kernels(rank.device)
        self._agreement = Agreement(rank.group, rank.files, rank.status, refused_kernels(rank.device))

    @torch.inference_mode()
    def execute(self, frame: Frame) -> None:
        """Do what a frame asks for and answer."""
        rank, message = self._rank, frame.message
        rank.begin()
        if isinstance(message, OfModel) and self._declines(message):
            rank.status.enter("idle")
            return
        match message:
            case Decode() | Encode():
                self._autoencoding.execute(message, frame.tensors)
            case Adapters():
                rank.adapters.learn(message, frame.tensors)
            case Release():
                self._release(message)
            case MeasureMachine():
                measure_machine(rank, message)
            case MeasureMemory():
                measure_memory(rank, message)
            case MeasureBlocks() | Sample() | Forward():
                self._compute(message, frame)
        if rank.meter.trace is not None:
            rank.meter.trace.write()
        rank.memory.trim()
        rank.status.enter("idle")

    def may_go_on(self, frame: Frame, error: Exception) -> bool:
        """Return True if this rank can continue after an error that all other ranks raise too.

        Return False for errors of memory, a device, the operating system or a connection.
        """
        failed = is_out_of_memory(error) or isinstance(error, OSError | dist.DistError)
        if failed or DEVICE_ERRORS.search(str(error)) or self._rank.status.phase == CONNECTING:
            return False
        return isinstance(frame.message, OfModel)

    def go_on(self, frame: Frame) -> None:
        """Go on after an error that was raised on all ranks alike. A collective."""
        assert isinstance(frame.message, OfModel)
        self._rank.go_on(frame.message)

    def _compute(self, message: MeasureBlocks | Sample | Forward, frame: Frame) -> None:
        """With all tensors on the device, but for residuals, which no rank needs whole, and the program, which is read here."""
        rank = self._rank
        residuals = {name: tensor for name, tensor in frame.tensors.items() if name.startswith(RESIDUAL)}
        tensors = {
            name: tensor if name == PROGRAM else tensor.to(rank.device)
            for name, tensor in frame.tensors.items()
            if name not in residuals
        }
        match message:
            case Sample():
                sample(rank, message, tensors)
            case Forward():
                single_forward(rank, message, tensors, residuals)
            case MeasureBlocks():
                measure_blocks(rank, message, tensors)

    def _release(self, message: Release) -> None:
        rank = self._rank
        started = rank.start()
        rank.holder.release(message.model, here=rank.group.rank in message.ranks)
        rank.report(message.request, message.model, started)
        if rank.group.rank == 0:
            rank.host.send(Done(message.request))

    def _declines(self, message: OfModel) -> bool:
        """Whether the ranks cannot do this together; rank 0 then tells the host why."""
        rank = self._rank
        problem = self._agreement.problem(message.plan, message.model)
        if problem and rank.group.rank == 0:
            rank.host.send(Declined(message.request, problem))
        return bool(problem)
