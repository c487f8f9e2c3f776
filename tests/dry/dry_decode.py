"""Runs one rank's decode at full size on a GPU that computes nothing, with the worker's own code."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_backend.comm.communicator import Communicator
from parallel_backend.comm.meter import Meter
from parallel_backend.diffusion import ModelSpec
from parallel_backend.vae import AUTOENCODERS, recognise
from parallel_backend.weights.files.checkpoint import read_header
from parallel_backend.wire.to_worker import DecodeRequest
from parallel_backend.worker.requests.autoencoding import Autoencoding
from tests.support.plans import gpu_plan

from .dry_rank import Result
from .fake_gpu import DEVICE, FakeGpu
from .full_size import CLIPS, write_header
from .lone_rank import LoneRank


class DryDecoder(LoneRank):
    """A rank that decodes with an autoencoder without data."""

    def __init__(self, gpu: FakeGpu, autoencoder: Any, ranks: int) -> None:
        super().__init__(DEVICE, Meter(), autoencoder)
        self.holder = self
        self.rank = self.step = 0
        self._gpu = gpu
        self._ranks = ranks

    def everyone(self, name: str, _: str) -> Communicator:
        """Return a communicator of all ranks; the other ranks are fake."""
        return Communicator(name, dist.group.WORLD if self._ranks > 1 else None, DEVICE, False, self.meter)

    def watch(self, *_: object) -> None:
        """Ignore the request to watch for cancellation."""

    def allowance(self, *_: object) -> None:
        """Set no limit of memory."""

    def hold(self, *_: object) -> SimpleNamespace:
        """Return a stand-in for a worker's part, with the autoencoder."""
        return SimpleNamespace(autoencoder=self._model)

    def start(self) -> float:
        """Start counting when the decode begins."""
        self._gpu.begin()
        return 0.0

    def enter(self, phase: str, step: int = 0) -> None:
        """Note that a piece of the decode is done."""
        self.step = step

    def on_progress(self) -> None:
        """Note that a layer is done. After the first layer the host may wait only for pixels."""
        self._gpu.watch = True

    def hand_over(self, _: object, pixels: Tensor) -> None:
        """Copy pixels to the host, which waits for them."""
        self._gpu.watch = False
        pixels.cpu()


def dry_decode(name: str, *, ranks: int = 1, whole: bool = True) -> Result:
    """Run the decode of the first rank and return its counts. All ranks share the rows, whatever their plan.

    Args:
        name: a key of CLIPS.
        ranks: number of ranks.
        whole: True for all frames, False for a few.
    """
    clip, plan = CLIPS[name], gpu_plan(blocks=1, ulysses=ranks)
    shape = clip.latent if whole else clip.short
    with tempfile.TemporaryDirectory() as folder:
        family, _, config = recognise(read_header(write_header(Path(folder), name)))
    autoencoder = AUTOENCODERS[family].build(config)
    gpu = FakeGpu()
    with gpu.running(0, plan.world_size), torch.inference_mode():
        autoencoder.module.to(torch.bfloat16).to_empty(device=DEVICE)
        gpu.keep()
        dry = DryDecoder(gpu, autoencoder, plan.world_size)
        message = DecodeRequest(1, ModelSpec(family, name, 0, 0, "bfloat16"), plan, "comfyui", shared=True)
        given: Mapping[str, Tensor] = {"latent": torch.zeros(shape, dtype=torch.bfloat16)}
        Autoencoding(dry).execute(message, given)  # type: ignore[arg-type]
        counts = gpu.begin()
    return Result(
        kernels=counts.kernels.total(),
        names=dict(counts.kernels),
        collectives=counts.collectives.total(),
        sent=sum(dry.meter.sent.values()),
        peak=counts.peak,
        formula=config.vae.memory_used_decode(shape, torch.bfloat16) / plan.world_size,
        waits=gpu.waited(),
    )
