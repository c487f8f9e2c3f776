"""The benchmark that the tab starts: a queue of jobs on this ComfyUI, with stock nodes and with this pack.

Each job is a normal prompt in ComfyUI's queue, and Cancel ends the job. If the user queues a prompt, the benchmark ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import comfy.model_management
import folder_paths
import msgspec
import psutil
import torch
from comfy.cli_args import args
from server import PromptServer

from ...parallel_backend.bench.cards import check_free
from ...parallel_backend.bench.client import ComfyUIError, Graph
from ...parallel_backend.bench.graphs import (
    FOLDER,
    JOBS,
    NotMeasured,
    is_graph,
    read_graph,
    staying,
    stock,
    with_own_outputs,
)
from ...parallel_backend.bench.measure import Steps
from ...parallel_backend.bench.peaks import watched_gpus, watched_memory
from ...parallel_backend.bench.record import Side, encoded, line
from ...parallel_backend.bench.server import GRAPH, Running
from ...parallel_backend.bench.sides import Bench, IdleServer, file_of, plans_of, sides, started, usual_devices
from ...parallel_backend.doctor.observations import measured
from ...parallel_backend.errors import Cancelled, Refused
from ...parallel_backend.gpus import ask_holders, visible_gpus
from ...parallel_backend.host import Backend
from .background import run_in_background
from .loaders import Loader, why_not
from .sprites import copy_sprites
from .turn import FAILED, Turn

LEAVING = 60.0
"""Longest time in seconds for ComfyUI's models to leave the devices."""

EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses under which a server answers that listens on all addresses."""

GRAPH_BYTES = 4 << 20
"""Largest size in bytes of a request with a graph. ComfyUI's largest templates have a hundredth of it."""

log = logging.getLogger(__name__)


class BenchRequest(msgspec.Struct, frozen=True):
    """A graph in ComfyUI's API format and its name. An empty graph stands for the small picture that comes with this pack."""

    graph: Graph = {}
    name: Annotated[str, msgspec.Meta(max_length=1024)] = ""


class SideStatus(msgspec.Struct, frozen=True):
    """One configuration's result for the page.

    Attributes:
        name, plan: the configuration.
        step: seconds per step.
        whole: seconds of the second job.
        peak: bytes on the fullest device.
        error: the relative L2 error of the latent against stock ComfyUI's; None if stock ComfyUI has no latent.
        failed: the reason why there are no measurements.
    """

    name: str
    plan: str
    step: float
    whole: float
    peak: int
    error: float | None
    failed: str

    @classmethod
    def of(cls, side: Side) -> SideStatus:
        """Return the status of a measured configuration."""
        whole = side.then.whole if side.then else 0.0
        peak = max(side.peak.values(), default=0)
        return cls(side.name, side.plan, side.step, whole, peak, side.error, side.failed)


class BenchStatus(msgspec.Struct, frozen=True):
    """The benchmark's status for the page.

    Attributes:
        doing: the measurement that runs now; empty if none runs.
        sides: the results so far.
        row: the results as a row of a Markdown table.
        file: the name of their file in FOLDER of the output folder.
        said: the reason why the benchmark ended early, if it did.
    """

    doing: str = ""
    sides: list[SideStatus] = []
    row: str = ""
    file: str = ""
    said: str = ""


class BenchRoute:
    """The benchmark's route, which runs one benchmark at a time. `backend` returns this process's Backend."""

    def __init__(self, backend: Callable[[], Backend], turn: Turn) -> None:
        self.status = BenchStatus()
        self._backend = backend
        self._turn = turn

    async def begin(self, request: BenchRequest) -> str:
        """Begin the benchmark of a request, and return the reason why it cannot be measured; empty if it has begun.

        Raises:
            TurnOccupied: another benchmark, a comparison or the doctor runs.
        """
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turn.begin(lambda: self._run(request, begun))
        try:
            await begun
        except (NotMeasured, Refused, OSError, msgspec.ValidationError) as error:
            return str(error)
        return ""

    async def _run(self, request: BenchRequest, begun: asyncio.Future[None]) -> None:
        """Prepare the benchmark, which completes `begun`, and measure."""
        before, self.status = self.status, BenchStatus("beginning")
        try:
            bench = await run_in_background(lambda: bench_of(request))
        except Exception as error:
            self.status = before
            begun.set_exception(error)
            return
        begun.set_result(None)
        await run_in_background(lambda: self._measure(bench))

    def _measure(self, bench: Bench) -> None:
        output = Path(folder_paths.get_output_directory())
        reason = ""
        try:
            with Running(own_url(), output) as client:
                self._report("measuring the links")
                begun = started(bench, Path(folder_paths.base_path), measured(self._backend(), bench.most).machine)
                (output / FOLDER).mkdir(exist_ok=True)
                for record in sides(bench, begun, lambda: self._idle(bench, client), self._report, self._show):
                    file = file_of(record, output / FOLDER)
                    file.write_bytes(encoded(record))
                    statuses = [SideStatus.of(side) for side in record.sides]
                    self.status = BenchStatus(self.status.doing, statuses, line(record), file.name)
        except Cancelled as why:
            reason = f"ended early, because {why}"
        except (NotMeasured, Refused, ComfyUIError, OSError) as error:
            reason = str(error)
        except Exception:
            log.exception("Parallel: the benchmark has failed")
            reason = FAILED
        finally:
            shutil.rmtree(output / JOBS, ignore_errors=True)
            self.status = msgspec.structs.replace(self.status, doing="", said=reason)

    @contextlib.contextmanager
    def _idle(self, bench: Bench, client: Running) -> Iterator[IdleServer]:
        """Provide this ComfyUI's server when no model is loaded.

        Raises:
            NotMeasured, Refused: the devices are in use.
            Cancelled: the user has queued a prompt.
        """
        if client.queued():
            raise Cancelled("a run was queued.")
        self._backend().stop()
        client.free()
        until = time.monotonic() + LEAVING
        while comfy.model_management.current_loaded_models and time.monotonic() < until:
            time.sleep(0.05)
        own = [process.pid for process in (psutil.Process(), *psutil.Process().children(recursive=True))]
        check_free(bench.gpus, bench.used, ask_holders(), own)
        with watched_gpus(bench.names) if bench.used else watched_memory(itself=True) as peaks:
            yield IdleServer(client, peaks)

    def _report(self, what: str) -> None:
        self.status = msgspec.structs.replace(self.status, doing=what)

    @contextlib.contextmanager
    def _show(self, title: str, steps: int) -> Iterator[Steps]:
        self._report(title)
        yield lambda done, of: self._report(f"{title}: step {done} of {of}")


def bench_of(request: BenchRequest) -> Bench:
    """Return the benchmark of a request.

    Raises:
        NotMeasured, Refused, OSError, msgspec.ValidationError: the graph cannot be measured.
    """
    if args.tls_keyfile:
        raise NotMeasured("ComfyUI was started with TLS (--tls-keyfile): run python -m parallel_backend.bench instead.")
    if not is_graph(request.graph):
        raise NotMeasured("the body is not a graph in ComfyUI's API format: send one.")
    if not request.graph:
        copy_sprites()
    graph = with_own_outputs(stock(request.graph or read_graph(GRAPH)))
    staying(graph, lambda loaders: [why_not(msgspec.convert(loader, Loader)) for loader in loaders])
    gpus = visible_gpus() if torch.cuda.is_available() and not args.cpu else ()
    return Bench(graph, request.name or GRAPH.stem, plans_of(usual_devices(len(gpus)), len(gpus)), gpus)


def own_url() -> str:
    """Return the URL of this ComfyUI."""
    server = PromptServer.instance
    address = EVERYWHERE.get(server.address, server.address)
    return f"http://{f'[{address}]' if ':' in address else address}:{server.port}"
