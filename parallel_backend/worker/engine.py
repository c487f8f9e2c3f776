"""Carrying out requests on one rank: every rank runs the same code on the same frame."""

from __future__ import annotations

import hashlib

import msgspec
import torch

from ..errors import Refused
from ..models.family import ModelSpec
from ..plan import ResolvedPlan
from ..wire.frames import Frame
from ..wire.messages import (
    RESIDUAL,
    Adapters,
    Declined,
    Decode,
    Done,
    Encode,
    Forward,
    MeasureBlocks,
    MeasureMachine,
    Release,
    Sample,
)
from .autoencoding import Autoencoding
from .measuring import measure_blocks, measure_machine
from .rank import Rank
from .sampling import sample
from .single_forward import single_forward


class Engine:
    """Gives each request to what carries it out, once all ranks agree on it."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._autoencoding = Autoencoding(rank)
        self._agreed: tuple[ResolvedPlan, ModelSpec] | None = None

    @torch.no_grad()
    def carry_out(self, frame: Frame) -> None:
        """Do what a frame asks for and answer."""
        rank, message = self._rank, frame.message
        rank.begin()
        if isinstance(message, Sample | Forward | Decode | Encode | MeasureBlocks) and not self._agree(message):
            rank.status.enter("idle")
            return
        match message:
            case Decode() | Encode():
                self._autoencoding.carry_out(message, frame.tensors)
            case Adapters():
                rank.adapters.learn(message, frame.tensors)
            case Release():
                self._release(message)
            case MeasureMachine():
                measure_machine(rank, message)
            case MeasureBlocks() | Sample() | Forward():
                self._compute(message, frame)
        if rank.meter.trace is not None:
            rank.meter.trace.write()
        rank.memory.trim()
        rank.status.enter("idle")

    def _compute(self, message: MeasureBlocks | Sample | Forward, frame: Frame) -> None:
        """With all tensors on the device, but for residuals, of which no rank needs all."""
        rank = self._rank
        residuals = {name: tensor for name, tensor in frame.tensors.items() if name.startswith(RESIDUAL)}
        tensors = {name: tensor.to(rank.device) for name, tensor in frame.tensors.items() if name not in residuals}
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
        rank.holder.release(message.model)
        rank.report(message.request, message.model, started)
        if rank.world.rank == 0:
            rank.link.send(Done(message.request))

    def _agree(self, message: Sample | Forward | Decode | Encode | MeasureBlocks) -> bool:
        """Whether all ranks are about to do the same and have the model's file; if not, rank 0 tells the host.

        A collective, for each new plan or model.
        """
        wanted = message.plan, message.model
        if self._agreed == wanted:
            return True
        self._rank.status.enter("comparing plan and model")
        digest = hashlib.sha256(msgspec.msgpack.encode(wanted)).hexdigest()[:16]
        problem = ""
        try:
            self._rank.files.find(message.model)
        except Refused as refusal:
            problem = str(refusal)
        said = [each.split(" ", 1) for each in self._rank.world.gather(f"{digest} {problem}")]
        for rank, (theirs, their_problem) in enumerate(said):
            if theirs != said[0][0]:
                their_problem = f"its plan and model are {theirs} and rank 0's {said[0][0]}."
            if their_problem:
                if self._rank.world.rank == 0:
                    self._rank.link.send(Declined(message.request, f"Worker {rank} of {len(said)}: {their_problem}"))
                return False
        self._agreed = wanted
        return True
