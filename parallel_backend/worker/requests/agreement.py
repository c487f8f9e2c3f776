"""Agreeing on what is to be done: all ranks were asked for the same plan and model, have its file and the plan's kernel."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Mapping

import msgspec

from ...diffusion import ModelSpec
from ...errors import Refused
from ...plan import ResolvedPlan
from ..memory.files import ModelFiles
from ..process.process_group import ProcessGroup
from ..process.status import RankProgress


class Agreement:
    """What all ranks last agreed on.

    Args:
        refusals: why attention that a plan can ask for does not run on this rank, by its name.
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
        """Return why the ranks cannot run this together, the same text on all ranks; empty if they can.

        A collective, unless it is what they last agreed on.
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
                    f"Worker {rank} of {len(entries)} on {host} was asked for plan and model {theirs} and worker 0 on {first} "
                    f"for {expected}: restart the workers."
                )
            if their_lack:
                return f"Worker {rank} of {len(entries)}: {their_lack}"
        self._agreed = current
        return ""

    def _lack(self, plan: ResolvedPlan, model: ModelSpec) -> str:
        """What this rank would need and has not, as a sentence; empty if it has everything."""
        if plan.stages and plan.attention in self._refusals:  # work cut in space takes any kernel
            return self._refusals[plan.attention]
        try:
            self._files.find(model)
        except Refused as refusal:
            return str(refusal)
        return ""
