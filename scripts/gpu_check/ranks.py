"""Checks of several ranks, which compare their common result with one rank's."""

from __future__ import annotations

import datetime
from abc import abstractmethod
from collections.abc import Sequence

import torch.distributed as dist

from parallel_backend.plan import ResolvedPlan

from .bench import SHORT, Bench, Run, error_of, nothing
from .report import Work


class Ranks(Bench):
    """Checks of several ranks, which may share a GPU."""

    def run(self) -> None:
        """Run the list together with the other ranks, in a process group as workers have."""
        backend = "cpu:gloo,cuda:nccl" if self.cuda else "gloo"
        dist.init_process_group(backend, timeout=datetime.timedelta(days=1))
        self.each(*self.checks())
        dist.destroy_process_group()

    @abstractmethod
    def checks(self) -> Sequence[Work]:
        """Return the checks of the list, in order."""

    def compare(self, name: str, plan: ResolvedPlan, run: Run, alone: Run) -> None:
        """Report a split's error and its time against one rank, on the rank that has the result."""
        found, expected = run(SHORT, nothing), alone(SHORT, nothing)
        (wall, host), (base, _) = self.step(run), self.step(alone)
        if found is not None:
            assert expected is not None
            error = error_of(found, expected)
            text = f"error {error:.1e}; {wall:.1f} ms a step (host {host:.1f}), one rank {base:.1f}"
            self.say(name, error < self.tolerance, text)
        self.needed(name, plan, run)
