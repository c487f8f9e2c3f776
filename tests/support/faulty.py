"""A ComfyUI whose workers can be struck by faults, and looking at what is left of them."""

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
from tests.support.server import fill
from tests.vae.comfy_vaes import save_image_vae

PATIENCE = {"silence": 6, "stall": 9}
"""Seconds that the workers of this ComfyUI are given before they count as failed."""

UNCAUGHT = """
import signal

def fail(*_):
    raise RuntimeError("an uncaught exception")

signal.signal(signal.SIGUSR1, fail)
NODE_CLASS_MAPPINGS = {}
"""
"""Custom nodes that raise in ComfyUI's main thread when they get a signal."""


class FaultyComfyUI(ComfyUI):
    """A ComfyUI with a temporary folder of its own, whose workers look for the fault that is to strike them."""

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
        """This server, started again where a test has ended it."""
        if self.process.poll() is not None:
            self.stop()
            self.start()
        return self

    # -- jobs

    def job(self, *, decoding: bool = False, workers: int = 2) -> Graph:
        """A job of a moment: a denoise of STEPS steps, or the decoding of a latent."""
        graph = parallel_decode() if decoding else parallel(denoise(), f"cpu:{workers}")
        # it makes no difference without PipeFusion, and keeps ComfyUI from taking the result of the run before
        graph["plan"]["inputs"]["warmup_steps"] = next(self._new)
        return graph

    def long(self, sampler: str = "euler", *, stepwise: bool = False, **plan: Any) -> Graph:
        """A denoise of minutes in steps of a fraction of a second."""
        seed = next(self._new)
        graph = ksampler_graph("tiny-schnell", width=256, height=256, steps=1000, sampler=sampler, seed=seed)
        return parallel(step_by_step(graph) if stepwise else graph, **plan)

    def assert_right(self, *, decoding: bool = False, workers: int = 2) -> None:
        """A job's result is that of ComfyUI's own loader."""
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
        """Queue a job in which a fault strikes; returns its prompt id. Earlier workers are ended where the fault asks for it."""
        if case.fresh:
            kill(*self.workers())
        self.fault.arm(case.text)
        return self.submit(self.job(decoding=case.phase == "decoding", workers=case.workers))

    def strike(self, case: Case) -> tuple[QueuedRun, float]:
        """What a job with a fault ends in, and how many seconds after the fault struck."""
        return self.outcome(self.begin(case))

    def outcome(self, prompt: str) -> tuple[QueuedRun, float]:
        """What a job ends in, and how many seconds after the fault struck."""
        try:
            run = self.wait(prompt, timeout=120)
        finally:
            self.fault.disarm()
        return run, self.fault.seconds()

    # -- what there is

    def workers(self) -> list[psutil.Process]:
        """The live workers by rank; they are named parallel-rankN."""
        return workers_among(self.children())

    def with_workers(self) -> list[psutil.Process]:
        """The workers, started if there are none, idle and with the model loaded."""
        self.assert_right()
        return self.workers()

    def folders(self) -> list[Path]:
        """What the pack has in the temporary folder."""
        return list(self.temporary.glob("comfyui-parallel-*"))

    def assert_nothing_left(self) -> None:
        """No worker, no folder with socket and logs, no shared memory."""
        assert not self.workers()
        assert not self.folders()
        assert set(os.listdir("/dev/shm")) <= self._shared_memory


def denoise() -> Graph:
    """With ComfyUI's own loader."""
    return ksampler_graph("tiny-schnell", width=64, height=64, steps=STEPS, cfg=2.0)


def decode() -> Graph:
    """With ComfyUI's own loader."""
    return {
        "vae": node("VAELoader", vae_name="flux.safetensors"),
        "latent": node("LoadLatent", latent="small.latent"),
        "pixels": node("VAEDecode", samples=["latent", 0], vae=["vae", 0]),
        "save": node("SaveImage", images=["pixels", 0], filename_prefix="faults"),
    }


def parallel_decode() -> Graph:
    """With Load Parallel VAE."""
    loader = node("LoadParallelVAE", vae_name="flux.safetensors", frame_batches="comfyui", plan=["plan", 0])
    return decode() | {"plan": node("ParallelPlan", devices="cpu:2"), "vae": loader}


def workers_among(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Workers by rank."""
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
    """Kill processes and wait until the kernel has ended them; their parent may not have noticed yet."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(alive(process) for process in processes), 10)


def alive(process: psutil.Process) -> bool:
    try:
        threads = os.listdir(f"/proc/{process.pid}/task")  # the kernel ends them one by one, the first being no sign
        return bool(process.status() != psutil.STATUS_ZOMBIE) or len(threads) > 1
    except (psutil.NoSuchProcess, FileNotFoundError):
        return False
