"""Backend: what nodes call. Keeps one group of workers a set of devices and starts it when it is needed."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..errors import Cancelled, WorkerFailed
from ..models.family import ModelSpec
from ..plan import ResolvedPlan
from ..wire.messages import Forward, Release, Sample
from .group import Answer, Deadlines, Interrupted, OnProgress, WorkerGroup
from .report import table
from .versions import check_versions

log = logging.getLogger(__name__)

__all__ = ["Backend", "Deadlines"]


class Backend:
    """The workers of one ComfyUI. Its methods block; they may be called from any thread, one at a time."""

    def __init__(self, deadlines: Deadlines | None = None) -> None:
        self._deadlines = deadlines or Deadlines()
        self._groups: dict[tuple[str, ...], WorkerGroup] = {}
        self._held: dict[tuple[str, ...], tuple[ModelSpec, int]] = {}
        self._generations = itertools.count(1)
        self._requests = itertools.count(1)
        self._lock = threading.RLock()
        self._closing = threading.Event()

    def sample(
        self, tensors: Mapping[str, Tensor], on_progress: OnProgress, interrupted: Interrupted, **fields: Any
    ) -> Answer:
        """Run a whole denoise; `fields` are those of the Sample message.

        The answer's tensor `result` is the final latent, fp32 on the CPU.

        Raises:
            Refused: an input cannot work.
            Cancelled: `interrupted` returned True.
            WorkerFailed: a worker failed; the next call starts new ones.
        """
        return self._request(Sample, fields, tensors, on_progress, interrupted)

    def forward(
        self,
        model: ModelSpec,
        plan: ResolvedPlan,
        compute_dtype: str,
        tensors: Mapping[str, Tensor],
        interrupted: Interrupted,
    ) -> Answer:
        """Run the model once; `result` is its output in the compute dtype, on the CPU. Raises as `sample` does."""
        fields = {"model": model, "plan": plan, "compute_dtype": compute_dtype}
        return self._request(Forward, fields, tensors, _no_progress, interrupted)

    def held_bytes(self, model: ModelSpec) -> int:
        """Bytes of this model's weights that rank 0 of a running group holds; 0 if none does."""
        return next((size for spec, size in self._held.values() if spec == model), 0)

    def release(self, model: ModelSpec) -> None:
        """Make the workers that hold this model give its memory back. Never fails: what has ended holds nothing."""
        with self._lock:
            for devices in [devices for devices, (spec, _) in self._held.items() if spec == model]:
                del self._held[devices]
                group = self._groups.get(devices)
                if group is not None and group.alive():
                    try:
                        group.carry_out(Release(next(self._requests)), {}, _no_progress, lambda: False)
                    except WorkerFailed as failure:
                        log.warning("%s", failure)
                        self._forget(devices)

    def close(self) -> None:
        """End all workers; requests, also the running one, are cancelled from here on.

        Workers that are too busy to stop soon end with this process.
        """
        self._closing.set()
        if not self._lock.acquire(timeout=self._deadlines.leave):
            return
        try:
            for group in self._groups.values():
                group.stop()
            self._groups.clear()
            self._held.clear()
        finally:
            self._lock.release()

    def _request(
        self,
        kind: type[Sample] | type[Forward],
        fields: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        on_progress: OnProgress,
        interrupted: Interrupted,
    ) -> Answer:
        def stopped() -> bool:
            return self._closing.is_set() or interrupted()

        with self._lock:
            if self._closing.is_set():
                raise Cancelled
            message = kind(request=next(self._requests), **fields)
            group = self._group(message.plan, stopped)
            try:
                answer = group.carry_out(message, tensors, on_progress, stopped)
            finally:
                if not group.alive():
                    self._forget(message.plan.devices)
            self._held[message.plan.devices] = (message.model, answer.frame.message.held_bytes)
            if isinstance(message, Sample):
                log.info("Parallel: %s\n%s", message.plan.describe(), table(answer.reports, message.plan.devices))
            return answer

    def _group(self, plan: ResolvedPlan, interrupted: Interrupted) -> WorkerGroup:
        """The running group on a plan's devices, or a new one; groups it shares a device with make way."""
        group = self._groups.get(plan.devices)
        if group is not None and group.alive():
            return group
        for devices in [devices for devices in self._groups if set(devices) & set(plan.devices)]:
            self._groups[devices].stop()
            self._forget(devices)
        check_versions()
        started = time.monotonic()
        log.info("Parallel: starting %d worker(s) on %s", plan.world_size, ", ".join(dict.fromkeys(plan.devices)))
        group = WorkerGroup(plan.devices, plan.transport, next(self._generations), self._deadlines, interrupted)
        log.info("Parallel: workers ready after %.1f s", time.monotonic() - started)
        self._groups[plan.devices] = group
        return group

    def _forget(self, devices: tuple[str, ...]) -> None:
        self._groups.pop(devices, None)
        self._held.pop(devices, None)


def _no_progress(step: int, denoised: Tensor, x: Tensor) -> None:
    """Requests other than Sample report no steps."""
