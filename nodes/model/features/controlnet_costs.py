"""What ControlNets cost a run whose sides are on two devices: forwards, seconds, and bytes that go to the workers."""

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
    """Of one run.

    Attributes:
        forwards: how often a ControlNet gave something new.
        making: seconds that it took in ComfyUI's process.
        sent: bytes that went to the workers.
        requests: seconds of each request that had some.
    """

    forwards: int = 0
    making: float = 0.0
    sent: int = 0
    requests: list[float] = field(default_factory=list)

    @contextmanager
    def made(self) -> Iterator[None]:
        """While a ControlNet gives something new."""
        began = time.monotonic()
        yield
        self.making += time.monotonic() - began
        self.forwards += 1

    @contextmanager
    def request(self, calls: Sequence[Conditioning]) -> Iterator[None]:
        """While calls are computed by the workers."""
        began = time.monotonic()
        yield
        self.requests.append(time.monotonic() - began)
        self.sent += sum(tensor.nbytes for call in calls for tensor in _of_controls(call.tensors))

    def sending(self, ran: Sequence[CostEvent]) -> float:
        """Return the mean seconds of a request in which no rank computed. Skip the first request, which loads weights.

        Args:
            ran: what the workers say of each.
        """
        gaps = [
            seconds - max((report.seconds for report in event.reports), default=0.0)
            for seconds, event in zip(self.requests, ran, strict=False)
        ][1:]
        return max(0.0, sum(gaps) / len(gaps)) if gaps else 0.0

    def in_words(self, steps: int, sending: float, saved: float | None) -> str:
        """Return all costs in words, for the log."""
        comparison = "" if saved is None else f", where the plan saves {saved:.3f} s a step (predicted)"
        return (
            f"the ControlNet ran {self.forwards} times in ComfyUI's process, {self.making / steps:.3f} s a step; "
            f"{amount(self.sent / steps)} a step went to the workers, {sending:.3f} s beside their work{comparison}"
        )

    def warning(self, steps: int, sending: float, saved: float | None) -> str | None:
        """That they cost more than the second device saves, if so."""
        if saved is None or sending <= saved:
            return None
        return (
            f"To send the ControlNet's output ({amount(self.sent / steps)} a step) takes {sending:.2f} s a step, and cfg 2 saves "
            f"{max(0.0, saved):.2f} s: choose one device in Parallel Plan."
        )


def saved_by_cfg(plan: ResolvedPlan, planned: PlanEvent | None) -> float | None:
    """Predicted seconds a step that a plan with a device for each side takes less than one device; None for other plans."""
    if planned is None or plan.cfg < 2:
        return None
    (chosen,) = (entry for entry in planned.choice.ranking if entry.plan == plan)
    return planned.choice.single.seconds - chosen.seconds


def _of_controls(tensors: Mapping[str, Tensor]) -> Iterator[Tensor]:
    yield from (tensor for name, tensor in tensors.items() if name.partition(".")[0] == CONTROL)
