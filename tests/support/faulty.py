"""A ComfyUI whose workers can be struck by injected faults, and checks of the processes and files that remain."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from parallel_backend.worker.process.environment import FAULT_FILE
from scripts.comfyui import ComfyUI, QueuedRun
from tests.faults.bench import STEPS, Case
from tests.faults.fault_file import FaultFile
from tests.support.graphs.flux import Graph, ksampler_graph, node, parallel, step_by_step
from tests.support.latents import relative_error, saved_latent
from tests.support.server import NARROW, fill
from tests.vae.comfy_vaes import save_image_vae

PATIENCE = {"silence": 6, "stall": 9}
"""Deadlines in seconds after which this ComfyUI counts a worker as failed."""

OUT_OF_MEMORY = (
    r"Worker 1 of 2 \(cpu\) ran out of memory while sampling, step 1: it asked for .* free, and held .*\. (?s:.*)TIPS"
)
"""Pattern of the error of a worker that runs out of memory in the first step, with ComfyUI's advice."""

UNCAUGHT = """
import signal

def fail(*_):
    raise RuntimeError("an uncaught exception")

signal.signal(signal.SIGUSR1, fail)
NODE_CLASS_MAPPINGS = {}
"""
"""Source of a custom node that raises in ComfyUI's main thread on SIGUSR1."""


class FaultyComfyUI(ComfyUI):
    """A ComfyUI with its own temporary folder, whose workers read a fault file for the fault that strikes them."""

    def __init__(self, base_dir: Path) -> None:
        self.temporary = base_dir / "temporary"
        self.temporary.mkdir()
        self.fault = FaultFile(base_dir)
        env = {
            "TMPDIR": str(self.temporary),
            FAULT_FILE: str(self.fault.path),
            "PARALLEL_DEADLINES": ",".join(f"{name}={seconds}" for name, seconds in PATIENCE.items()),
        }
        super().__init__(os.environ["COMFYUI_PATH"], base_dir, env=env)
        fill(self)
        (base_dir / "custom_nodes" / "uncaught.py").write_text(UNCAUGHT)
        save_image_vae(base_dir / "models" / "vae" / "flux.safetensors", torch.float16)
        latent = torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(2))
        tensors = {"latent_tensor": latent, "latent_format_version_0": torch.tensor([])}
        save_file(tensors, self.input_dir / "small.latent")
        self._new = itertools.count()
        self._right: dict[bool, Tensor] = {}
        self._shared_memory = set(os.listdir("/dev/shm"))

    def started(self) -> FaultyComfyUI:
        """Return this server. Start the server again if a test has ended it."""
        if self.process.poll() is not None:
            self.stop()
            self.start()
        return self

    # -- jobs

    def job(self, *, decoding: bool = False, workers: int = 2) -> Graph:
        """Return the graph of a short job: a denoise of STEPS steps, or the decoding of a latent."""
        graph = parallel_decode() if decoding else parallel(denoise(), f"cpu:{workers}")
        # a new value keeps ComfyUI from reusing the last run's cached result; without PipeFusion it has no other effect
        graph["plan"]["inputs"]["warmup_steps"] = next(self._new)
        return graph

    def long(self, sampler: str = "euler", *, stepwise: bool = False, **plan: Any) -> Graph:
        """Return the graph of a denoise that takes minutes, in steps of a fraction of a second."""
        seed = next(self._new)
        graph = ksampler_graph("tiny-schnell", width=256, height=256, steps=1000, sampler=sampler, seed=seed)
        return parallel(step_by_step(graph) if stepwise else graph, **plan)

    def assert_right(self, *, decoding: bool = False, workers: int = 2) -> None:
        """Assert that a job gives the same result as ComfyUI's own loader."""
        if decoding not in self._right:
            own = self.queue(decode() if decoding else denoise(), timeout=300).check()
            self._right[decoding] = self._result(own, decoding)
        run = self.queue(self.job(decoding=decoding, workers=workers), timeout=300).check()
        if decoding:
            assert (self._result(run, decoding) - self._right[decoding]).abs().max() <= 1  # of 255
        else:
            assert relative_error(self._result(run, decoding), self._right[decoding]) <= 1e-5

    def _result(self, run: QueuedRun, decoding: bool) -> Tensor:
        if not decoding:
            return saved_latent(self, run)
        (file,) = self.files(run, "save")
        return torch.from_numpy(np.asarray(Image.open(file)).astype("int16"))

    # -- faults

    def begin(self, case: Case) -> str:
        """Queue a job in which a fault strikes, and return its prompt id.

        Kill earlier workers first if the case asks for that.
        """
        if case.fresh:
            kill(*self.workers())
        self.fault.arm(case.text)
        return self.submit(self.job(decoding=case.phase == "decoding", workers=case.workers))

    def strike(self, case: Case) -> tuple[QueuedRun, float]:
        """Run a job with a fault. Return the ended run and the seconds between the fault and the end."""
        return self.outcome(self.begin(case))

    def outcome(self, prompt: str) -> tuple[QueuedRun, float]:
        """Wait for a job. Return the ended run and the seconds between the fault and the end."""
        try:
            run = self.wait(prompt, timeout=120)
        finally:
            self.fault.disarm()
        return run, self.fault.seconds()

    # -- processes and files

    def workers(self) -> list[psutil.Process]:
        """Return the live workers in rank order. Their processes are named parallel-rankN."""
        return workers_among(self.children())

    def with_workers(self) -> list[psutil.Process]:
        """Return the workers, idle and with the model loaded; start them if there are none."""
        self.assert_right()
        return self.workers()

    def folders(self) -> list[Path]:
        """Return the pack's folders in the temporary folder."""
        return list(self.temporary.glob("comfyui-parallel-*"))

    def assert_nothing_left(self) -> None:
        """Assert that no worker, no folder with a socket and logs, and no shared memory is left."""
        assert not self.workers()
        assert not self.folders()
        assert set(os.listdir("/dev/shm")) <= self._shared_memory


def denoise() -> Graph:
    """Return the graph of a denoise with ComfyUI's own loader."""
    return ksampler_graph(NARROW, width=64, height=64, steps=STEPS, cfg=2.0)


def decode() -> Graph:
    """Return the graph that decodes a latent with ComfyUI's own loader."""
    return {
        "vae": node("VAELoader", vae_name="flux.safetensors"),
        "latent": node("LoadLatent", latent="small.latent"),
        "pixels": node("VAEDecode", samples=["latent", 0], vae=["vae", 0]),
        "save": node("SaveImage", images=["pixels", 0], filename_prefix="faults"),
    }


def parallel_decode() -> Graph:
    """Return the graph that decodes a latent with Load Parallel VAE."""
    loader = node("LoadParallelVAE", vae_name="flux.safetensors", frame_batches="comfyui", plan=["plan", 0])
    return decode() | {"plan": node("ParallelPlan", devices="cpu:2"), "vae": loader}


def workers_among(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return the workers among `processes`, in rank order."""
    ranks = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.name().startswith("parallel-rank"):
                ranks[int(process.name().removeprefix("parallel-rank"))] = process
    return [ranks[rank] for rank in sorted(ranks)]


def wait_until(condition: Callable[[], Any], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


def kill(*processes: psutil.Process) -> None:
    """Kill processes and wait until the kernel has ended them; their parents may not have reaped them yet."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(alive(process) for process in processes), 10)


def alive(process: psutil.Process) -> bool:
    try:
        threads = os.listdir(f"/proc/{process.pid}/task")  # threads end one by one, in any order
        return bool(process.status() != psutil.STATUS_ZOMBIE) or len(threads) > 1
    except (psutil.NoSuchProcess, FileNotFoundError):
        return False
