"""The sidebar tab's routes and events. An open page receives every change of the state, at most once per second."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec
from aiohttp import web
from server import PromptServer

from ...parallel_backend.derive.declaration_cache import all_records
from ...parallel_backend.diffusion import ModelSpec
from ...parallel_backend.doctor import Finding, diagnose, of_derived
from ...parallel_backend.errors import Cancelled, Refused, RequestFailed, WorkerFailed
from ...parallel_backend.host import Backend
from ...parallel_backend.host.planning.comparison import Comparison
from ...parallel_backend.host.planning.devices import DeviceMemory, device_memory
from ...parallel_backend.host.workers.status import BackendStatus
from ..memory.devices import free_devices
from ..progress import NodeProgress, RunEnd
from .bench import GRAPH_BYTES, BenchRequest, BenchRoute, BenchStatus
from .body import JsonBody
from .doctor import DISTURBING, DoctorRoute, DoctorStatus, Look, look_at_models
from .route import Route, as_json
from .turn import FAILED, Turn

EVENT = "parallel.status"

SECONDS = 1.0
"""Seconds between two comparisons of the state with the last state sent to pages."""

LOOK_SECONDS = 3.0
"""Seconds between two queries of device memory and of derived declarations. The driver's tool is a process of its own."""

ATTENTION_SECONDS = 60.0
"""Seconds after a page's request in which the page receives changes. An open panel asks again earlier."""

log = logging.getLogger(__name__)


class ComparisonStatus(msgspec.Struct, frozen=True):
    """The status of the comparison of the last run's plan with one device.

    Attributes:
        doing: the present measurement; empty if no comparison runs.
        result: the last result.
        said: the reason why there is no result, after an error.
        run: the number of the run that the result belongs to.
    """

    doing: str = ""
    result: Comparison | None = None
    said: str = ""
    run: int = 0


class PanelStatus(msgspec.Struct, frozen=True):
    """The panel's state, without the last run."""

    workers: BackendStatus
    memory: list[DeviceMemory]
    derived: list[Finding]
    doctor: DoctorStatus
    comparison: ComparisonStatus
    bench: BenchStatus
    last_end: RunEnd


class Panel:
    """The tab's routes.

    Args:
        backend: returns this process's Backend, which is created at first use.
        progress: returns the listener that knows the runs of nodes.
    """

    def __init__(
        self, backend: Callable[[], Backend], progress: Callable[[], NodeProgress], doctor: DoctorRoute, turn: Turn
    ) -> None:
        self._backend = backend
        self._progress = progress
        self._doctor = doctor
        self._turn = turn
        self._bench = BenchRoute(backend, turn)
        self._memory: list[DeviceMemory] = []
        self._derived: list[Finding] = []
        self._looked_at = self._watched_until = float("-inf")
        self._broadcasting: asyncio.Task[None] | None = None
        self._comparison = ComparisonStatus()

    def routes(self) -> tuple[Route, ...]:
        """Return the routes of the state, the last run, and the actions, which reply with a sentence when done or begun."""
        return (
            Route("GET", "status", self._status),
            Route("GET", "run", self._run),
            Route("POST", "free", self._free),
            Route("POST", "stop", self._stop),
            Route("POST", "measure", self._measure),
            Route("POST", "doctor", self._begin_doctor),
            Route("POST", "models", self._begin_models),
            Route("POST", "compare", self._begin_comparison),
            Route("POST", "bench", self._begin_bench, JsonBody(BenchRequest, "a graph", GRAPH_BYTES, BenchRequest())),
        )

    async def _status(self) -> web.Response:
        """Return the state now. Changes of the next minute are sent as events."""
        self._watched_until = time.monotonic() + ATTENTION_SECONDS
        if self._broadcasting is None or self._broadcasting.done():
            self._broadcasting = asyncio.create_task(self._broadcast())
        return as_json(self._now())

    async def _run(self) -> web.Response:
        """Reply with the last run; null before the first."""
        return as_json(await asyncio.to_thread(self._backend().last_run))

    async def _free(self) -> web.Response:
        return await self._answer_after(self._backend().free, "The models were unloaded from the devices.")

    async def _stop(self) -> web.Response:
        return await self._answer_after(self._backend().stop, "The workers have ended; the next run starts new ones.")

    async def _measure(self) -> web.Response:
        def measure() -> None:
            self._backend().measure_again(lambda: False)

        return await self._answer_after(measure, "Measured; the next run chooses its plan anew.")

    async def _begin_doctor(self) -> web.Response:
        return self._begin(diagnose)

    async def _begin_models(self) -> web.Response:
        return self._begin(look_at_models)

    def _begin(self, look: Look) -> web.Response:
        """Start the doctor and reply at once. The status brings the findings."""
        if self._is_busy():
            return as_json({"said": DISTURBING}, 409)
        self._doctor.begin(look)
        return as_json({"said": ""})

    async def _begin_comparison(self) -> web.Response:
        """Start a comparison and reply at once. The status brings the result. A queued prompt ends the comparison."""
        if self._is_busy():
            return as_json({"said": "a run is going on: compare once it is done."}, 409)
        self._turn.begin(self._compare)
        return as_json({"said": ""})

    async def _begin_bench(self, request: BenchRequest) -> web.Response:
        """Start a benchmark and reply at once with a sentence: empty, or the reason why it cannot be measured."""
        if self._is_busy():
            return as_json({"said": "a run is going on: measure once it is done."}, 409)
        reason = await self._bench.begin(request)
        return as_json({"said": reason}, 409 if reason else 200)

    async def _compare(self) -> None:
        before = self._comparison
        message = FAILED

        def report(what: str) -> None:
            self._comparison = msgspec.structs.replace(before, doing=what, said="")

        def free_memory(model: ModelSpec, devices: tuple[str, ...], worker_bytes: float) -> None:
            free_devices(backend, model, devices, worker_bytes)

        report("beginning")
        try:
            backend = self._backend()
            run = backend.status().runs
            result = await asyncio.to_thread(backend.compare, free_memory, report, _is_queued)
            before, message = ComparisonStatus("", result, run=run), ""
        except (Refused, RequestFailed, WorkerFailed) as error:
            message = str(error)
        except Cancelled:
            message = "stopped, because a run was queued."
        except Exception:
            log.exception("Parallel: the comparison has failed")
        finally:
            self._comparison = msgspec.structs.replace(before, doing="", said=message)

    def _is_busy(self) -> bool:
        """Return True if a prompt runs or waits, or if a job runs whose load would falsify time measurements."""
        groups = self._backend().status().groups
        return self._turn.is_running or _is_queued() or any(group.state in ("running", "starting") for group in groups)

    async def _answer_after(self, action: Callable[[], None], text: str) -> web.Response:
        try:
            await asyncio.to_thread(action)
        except Refused as refusal:
            return as_json({"said": str(refusal)}, 409)
        except (RequestFailed, WorkerFailed, Cancelled) as failure:
            return as_json({"said": str(failure)}, 500)
        return as_json({"said": text})

    def _now(self) -> PanelStatus:
        return PanelStatus(
            self._backend().status(),
            self._memory,
            self._derived,
            self._doctor.status,
            self._comparison,
            self._bench.status,
            self._progress().last_end,
        )

    async def _broadcast(self) -> None:
        """Send the state to all pages whenever it changes, as long as a page has asked recently."""
        sent: PanelStatus | None = None
        while time.monotonic() < self._watched_until:
            if time.monotonic() - self._looked_at > LOOK_SECONDS:
                self._memory = await asyncio.to_thread(device_memory)
                self._derived = await asyncio.to_thread(lambda: of_derived(all_records()))
                self._looked_at = time.monotonic()
            now = self._now()
            if now != sent:
                PromptServer.instance.send_sync(EVENT, msgspec.to_builtins(now))
                sent = now
            await asyncio.sleep(SECONDS)


def _is_queued() -> bool:
    """Return True if a prompt runs or waits."""
    return bool(PromptServer.instance.prompt_queue.get_tasks_remaining())
