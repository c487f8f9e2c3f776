"""The cost of ControlNets in a run whose branches are on two devices: forwards, seconds, and bytes sent to the workers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from ....parallel_backend.conditioning import Conditioning
from ....parallel_backend.host.planning.events import CostEvent, PlanEvent
from ....parallel_backend.host.runs.outcome import amount
from ....parallel_backend.models.comfyui.rows import CONTROL
from ....parallel_backend.plan import ResolvedPlan


@dataclass
class ControlCosts:
    """The costs of the ControlNets in one run.

    Attributes:
        forwards: the number of ControlNet outputs that were computed.
        making: the seconds that ControlNets took in ComfyUI's process.
        sent: the bytes of ControlNet outputs that were sent to the workers.
        requests: the seconds of each request with ControlNet outputs.
    """

    forwards: int = 0
    making: float = 0.0
    sent: int = 0
    requests: list[float] = field(default_factory=list)

    @contextmanager
    def made(self) -> Iterator[None]:
        """Measure the computation of a ControlNet's output inside this context."""
        began = time.monotonic()
        yield
        self.making += time.monotonic() - began
        self.forwards += 1

    @contextmanager
    def request(self, calls: Sequence[Conditioning]) -> Iterator[None]:
        """Measure a request to the workers inside this context, and count the bytes of ControlNet outputs in its calls."""
        began = time.monotonic()
        yield
        self.requests.append(time.monotonic() - began)
        self.sent += sum(tensor.nbytes for call in calls for tensor in _of_controls(call.tensors))

    def sending(self, ran: Sequence[CostEvent]) -> float:
        """Return the mean seconds of a request in which no rank computed. Skip the first request, which loads weights.

        Args:
            ran: the workers' reports of each request.
        """
        gaps = [
            seconds - max((report.seconds for report in event.reports), default=0.0)
            for seconds, event in zip(self.requests, ran, strict=False)
        ][1:]
        return max(0.0, sum(gaps) / len(gaps)) if gaps else 0.0

    def in_words(self, steps: int, sending: float, saved: float | None) -> str:
        """Return all costs in words, for the log."""
        comparison = "" if saved is None else f"; the plan saves {saved:.3f} s a step (predicted)"
        return (
            f"the ControlNet ran {self.forwards} times in ComfyUI's process ({self.making / steps:.3f} s a step). Sending its "
            f"output to the workers ({amount(self.sent / steps)} a step) took {sending:.3f} s a step{comparison}"
        )

    def warning(self, steps: int, sending: float, saved: float | None) -> str | None:
        """Return a warning if the costs exceed the time that the second device saves; None otherwise."""
        if saved is None or sending <= saved:
            return None
        return (
            f"Sending the ControlNet's output ({amount(self.sent / steps)} a step) takes {sending:.2f} s a step and cfg 2 saves "
            f"{max(0.0, saved):.2f} s: choose one device in Parallel Plan."
        )


def saved_by_cfg(plan: ResolvedPlan, planned: PlanEvent | None) -> float | None:
    """Return the predicted seconds per step that a plan with a GPU per branch saves; None for other plans."""
    if planned is None or plan.cfg < 2 or not plan.on_gpus:
        return None
    (chosen,) = (entry for entry in planned.choice.ranking if entry.plan == plan)
    return planned.choice.single.seconds - chosen.seconds


def _of_controls(tensors: Mapping[str, Tensor]) -> Iterator[Tensor]:
    yield from (tensor for name, tensor in tensors.items() if name.partition(".")[0] == CONTROL)
