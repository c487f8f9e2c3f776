"""Injects faults into real workers, one after another, and checks that each leaves nothing behind."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from parallel_backend.diffusion import ModelSpec
from parallel_backend.errors import Cancelled, WorkerFailed
from parallel_backend.host import Backend
from parallel_backend.host.workers.pending_request import RequestContext
from parallel_backend.plan import ParallelPlan, ResolvedPlan
from parallel_backend.worker.process.environment import FAULT_FILE
from parallel_backend.worker.process.faults import LATE_SECONDS
from tests.engine.conftest import Job, Runner, sigmas
from tests.faults.fault_file import FaultFile
from tests.support.plans import cpu_plan
from tests.support.reliability import Ledger
from tests.support.selection import thorough
from tests.support.tiny.flux import save_flux
from tests.vae.comfy_vaes import save_comfy_vae

STEPS = 3

PHASES = {
    "starting": 0,
    "joining the other workers": 0,
    "connecting the workers": 0,
    "loading the model": 0,
    "sampling, first step": 1,
    "sampling, last step": STEPS,
    "decoding": None,
}
"""The phases of a denoise and the decoding of its result, with the step at which a fault strikes.

0 stands for a phase without steps, of workers that have just been started.
"""

DEATHS = {
    "kill": "was killed by SIGKILL",
    "segv": "was killed by SIGSEGV",
    "term": "was killed by SIGTERM",
    "exit0": "ended with exit code 0",
    "exit3": "ended with exit code 3",
}
"""Ways in which a process ends, and the message's words for each."""

BOUND = 5
"""Seconds from a death, or an exception, to the error; about one on a quiet machine."""

CANCEL_BOUND = LATE_SECONDS + 3
"""Seconds from the moment when a worker is delayed, and Cancel pressed, to the end: the worker leaves with the model call."""

ERROR = "one error"
"""An outcome in the table: a message with rank, phase and step, followed by the checks of `Bench.assert_recovered`."""

LATENT = torch.linspace(-1, 1, 16 * 8 * 8).view(1, 16, 1, 8, 8)

AFTERWARDS = "The workers were stopped; queue the prompt again and they start afresh."

PLANS = {2: cpu_plan(ulysses=2), 4: cpu_plan(pipefusion=2, ulysses=2, patches=1)}


@dataclass(frozen=True)
class Case:
    """A fault of one rank in one phase."""

    workers: int
    rank: int
    phase: str
    kind: str

    @property
    def plan(self) -> ResolvedPlan:
        """Return the plan under which the fault strikes."""
        return PLANS[self.workers]

    @property
    def worker(self) -> str:
        """Return the rank's name in messages."""
        return f"Worker {self.rank} of {self.workers} (cpu)"

    @property
    def place(self) -> str:
        """Return the words of messages for the phase and step."""
        phase, step = self.phase.partition(",")[0], PHASES[self.phase]
        return f"{phase}, step {step}" if step else phase

    @property
    def text(self) -> str:
        """Return the fault's text as the worker reads it."""
        phase = self.phase.partition(",")[0]
        return f"rank={self.rank},phase={phase},step={PHASES[self.phase] or 0},kind={self.kind}"

    @property
    def fresh(self) -> bool:
        """Return True if the phase is one of workers that have just been started."""
        return PHASES[self.phase] == 0

    def __str__(self) -> str:
        return f"{self.kind} of rank {self.rank} of {self.workers} while {self.phase}"


class Bench:
    """A backend in a folder of its own, and the expected latent and frames by the number of workers."""

    def __init__(self, folder: Path, ledger: Ledger) -> None:
        self._ledger = ledger
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        tempfile.tempdir = str(self.temporary)
        self.fault = FaultFile(folder)
        os.environ[FAULT_FILE] = str(self.fault.path)
        self.backend = Backend()
        self.run = Runner(self.backend)
        self.job = Job(save_flux(folder / "tiny.safetensors", heads=2), sigmas(STEPS), height=8, width=8)
        vae = folder / "vae.safetensors"
        save_comfy_vae(vae, "wan")
        self.vae = ModelSpec("comfyui vae", str(vae), 0, vae.stat().st_size, "float32")
        self.right = functools.cache(lambda workers: self.run(self.job, PLANS[workers]))
        self.picture = functools.cache(self.decode)
        assert self.right(2).isfinite().all() and self.picture(2).isfinite().all()
        self._shared_memory = set(os.listdir("/dev/shm"))

    def close(self) -> None:
        """Stop the workers and restore the settings."""
        self.run.close()
        tempfile.tempdir = None
        del os.environ[FAULT_FILE]

    def workers(self) -> list[psutil.Process]:
        """Return the live workers, sorted by rank."""
        ranks: dict[tuple[str, int], psutil.Process] = {}
        for server in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if "parallel_backend.worker.forkserver" in server.cmdline():
                    ranks |= {(w.name(), w.pid): w for w in server.children() if w.status() != psutil.STATUS_ZOMBIE}
        return [ranks[key] for key in sorted(ranks)]

    def end_workers(self) -> None:
        """Kill all workers, as if nothing had ever run."""
        for worker in self.workers():
            with contextlib.suppress(psutil.NoSuchProcess):  # the group stops its other workers when one dies
                worker.kill()
        deadline = time.monotonic() + 10
        while self.workers():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def decode(
        self,
        workers: int,
        is_cancelled: Callable[[], bool] = lambda: False,
        latent: Tensor = LATENT,
        pieces: list[Tensor] | None = None,
    ) -> Tensor:
        """Return a latent's frames, `[3, frames, height, width]`. `pieces` collects the frames that have arrived."""
        pieces = [] if pieces is None else pieces
        self.backend.decode(
            self.vae,
            ParallelPlan(devices=f"cpu:{workers}"),
            "",
            latent,
            lambda item, start, pixels: pieces.append(pixels.clone()),
            RequestContext(is_cancelled),
        )
        return torch.cat(pieces, dim=1)

    def assert_result(self, case: Case, is_cancelled: Callable[[], bool]) -> None:
        """Run the case's denoise or decode. Its result, if there is one, equals the earlier one."""
        if case.phase == "decoding":
            assert torch.equal(self.decode(case.workers, is_cancelled), self.picture(case.workers))
        else:
            assert torch.equal(self.run(self.job, case.plan, is_cancelled=is_cancelled), self.right(case.workers))

    def prepare(self, case: Case) -> None:
        """Arm a fault for workers that have the model, or for workers that are still to start."""
        assert self.right(case.workers).isfinite().all() and self.picture(case.workers).isfinite().all()
        if case.fresh:
            self.end_workers()
        else:
            self.assert_right(case.workers)
        self.fault.arm(case.text)

    def outcome(self, case: Case, is_cancelled: Callable[[], bool] = lambda: False) -> tuple[str, float]:
        """Return the message of a run with this fault ("" for a result), and the seconds since the fault struck."""
        self.prepare(case)
        try:
            self.assert_result(case, is_cancelled)
            message = ""
        except WorkerFailed as failure:
            message = str(failure)
        except Cancelled:
            message = "cancelled"
        finally:
            self.fault.disarm()
        assert self.fault.struck(), f"{case} did not strike"
        return message, self.fault.seconds()

    def assert_nothing_left(self, others: int = 0) -> None:
        """Assert that no worker but `others` of another backend, no folder with socket and logs, and no shared
        memory is left.
        """
        assert len(self.workers()) == others
        assert len(list(self.temporary.glob("comfyui-parallel-*"))) == bool(others)
        assert set(os.listdir("/dev/shm")) <= self._shared_memory

    def assert_right(self, workers: int) -> None:
        """Assert that an ordinary run gives the same latent as before."""
        assert torch.equal(self.run(self.job, PLANS[workers]), self.right(workers))

    def assert_recovered(self, workers: int, others: int = 0) -> None:
        """Assert that nothing is left of a failed run, and that the next run is right."""
        self.assert_nothing_left(others)
        self.assert_right(workers)

    def held(self, fault: str, outcome: str, seconds: float, bound: float) -> None:
        """Enter a case into the table of docs/measured/reliability.md."""
        self._ledger.held("backend", fault, outcome, seconds, bound)

    def assert_dies(self, case: Case, others: int = 0) -> None:
        """Assert that a death gives one clear error, leaves nothing behind, and that the next run is right."""
        message, seconds = self.outcome(case)
        said = f"{case.worker} {DEATHS[case.kind]} while {case.place}. "
        assert message.startswith(said), f"{message!r} instead of {said!r}"
        assert AFTERWARDS in message
        self.assert_recovered(case.workers, others)
        self.held(f"a worker {DEATHS[case.kind]}", ERROR, seconds, BOUND)


def deaths(sizes: Iterable[int], quick: Collection[str] = tuple(PHASES)) -> list[pytest.ParameterSet]:
    """Return deaths of every rank in every phase, of every kind. The quick run has one in each of some phases.

    In the quick run's cases the ranks and the kinds take turns.
    """
    kinds = list(DEATHS)
    cases = []
    for workers, (turn, phase) in itertools.product(sizes, enumerate(PHASES)):
        of_quick = Case(workers, turn % workers, phase, kinds[turn % len(kinds)]) if phase in quick else None
        for rank, kind in itertools.product(range(workers), kinds):
            case = Case(workers, rank, phase, kind)
            cases.append(pytest.param(case, id=str(case), marks=() if case == of_quick else thorough))
    return cases
