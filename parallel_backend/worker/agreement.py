"""Agreeing on what is to be done: every rank has been asked for the same plan and model, and has the model's file."""

from __future__ import annotations

import hashlib
import socket

import msgspec

from ..errors import Refused
from ..models.family import ModelSpec
from ..plan import ResolvedPlan
from .files import ModelFiles
from .status import Status
from .world import World


class Agreement:
    """What all ranks last agreed on."""

    def __init__(self, world: World, files: ModelFiles, status: Status) -> None:
        self._world = world
        self._files = files
        self._status = status
        self._agreed: tuple[ResolvedPlan, ModelSpec] | None = None

    def problem(self, plan: ResolvedPlan, model: ModelSpec) -> str:
        """Why the ranks cannot do this together, the same on all of them; empty where they can.

        A collective, unless it is what they last agreed on.
        """
        wanted = plan, model
        if self._agreed == wanted:
            return ""
        self._status.enter("comparing plan and model")
        digest = hashlib.sha256(msgspec.msgpack.encode(wanted)).hexdigest()[:16]
        missing = ""
        try:
            self._files.find(model)
        except Refused as refusal:
            missing = str(refusal)
        said = [each.split(" ", 2) for each in self._world.gather(f"{digest} {socket.gethostname()} {missing}")]
        expected, first, _ = said[0]
        for rank, (theirs, host, their_missing) in enumerate(said):
            if theirs != expected:
                return (
                    f"Worker {rank} of {len(said)} on {host} was asked for plan and model {theirs} and worker 0 on {first} "
                    f"for {expected}: restart the workers."
                )
            if their_missing:
                return f"Worker {rank} of {len(said)}: {their_missing}"
        self._agreed = wanted
        return ""
