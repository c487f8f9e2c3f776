"""Memory and time of decoding on several ranks, on CPUs with gloo and one thread a rank.

Writes docs/vae.md. Run from the repository root: OMP_NUM_THREADS=1 python -m benchmarks.vae_decode
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_backend.comm.communicator import Communicator
from parallel_backend.comm.meter import Meter
from parallel_backend.vae import Autoencoder
from parallel_backend.vae.cogvideox import CogVideoXAutoencoder, CogVideoXConfig
from parallel_backend.vae.kl import KLAutoencoder, KLConfig
from parallel_backend.vae.rows import slab_of
from scripts.comfyui import REPO
from tests.allocations import peak_bytes
from tests.ranks import run_ranks
from tests.tiny_vae import random_weights

RANKS = (1, 2, 3, 4, 8)
ROUNDS = 3
MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Subject:
    """What is decoded."""

    title: str
    autoencoder: Autoencoder
    latent: Tensor
    schedule: str


def subjects() -> list[Subject]:
    """A clip by both schedules, and a picture."""
    video = CogVideoXAutoencoder(CogVideoXConfig((64, 128, 128, 256), 3, 16))
    image = KLAutoencoder(KLConfig(128, 128, 16, False))
    for autoencoder in (video, image):
        module = autoencoder.module.to_empty(device="cpu")
        module.load_state_dict(random_weights(module, seed=0))
    clip = torch.randn(1, 16, 5, 16, 12)
    return [
        Subject("CogVideoX, 17 frames of 96x128, original batches", video, clip, "original"),
        Subject("CogVideoX, 17 frames of 96x128, ComfyUI's batches", video, clip, "comfyui"),
        Subject("FLUX, 256x256", image, torch.randn(1, 16, 32, 32), "original"),
    ]


def decode(subject: Subject, axis: Communicator) -> None:
    """Decode once; the first rank gets all pixels."""
    for piece in subject.autoencoder.decode(slab_of(subject.latent, axis), subject.schedule, lambda: None):
        piece.whole()


def measure(subject: Subject, ranks: int) -> tuple[list[int], list[int], float]:
    """Each rank's peak bytes and bytes sent, and the median seconds of a decode, the first of which is not counted.

    The peak is activations, what they are exchanged with, and pixels; no weights.
    """

    def work(rank: int) -> tuple[int, int, list[float]]:
        torch.set_grad_enabled(False)
        meter = Meter()
        group = dist.group.WORLD if ranks > 1 else None
        axis = Communicator("rows", group, torch.device("cpu"), False, meter)
        decode(subject, axis)
        meter.reset()
        seconds = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            decode(subject, axis)
            seconds.append(time.perf_counter() - started)
        sent = meter.sent["rows"] // ROUNDS
        return peak_bytes(lambda: decode(subject, axis)), sent, seconds

    results = run_ranks(ranks, work, timeout=600)
    slowest = [max(rank[2][round] for rank in results) for round in range(ROUNDS)]
    return [rank[0] for rank in results], [rank[1] for rank in results], median(slowest)


def main() -> None:
    """Measure and write."""
    text = [
        "# Decoding on several ranks",
        "",
        "Written by `OMP_NUM_THREADS=1 python -m benchmarks.vae_decode`: random autoencoders in fp32 on CPUs (gloo, one "
        "thread a rank); CogVideoX's with half its channels, FLUX's in full. *Peak*: bytes of tensors alive at the "
        "same time at the most, on the rank that needs most, without weights; the first rank also gathers the pixels. *Share*: "
        "against one rank. *Sent*: by the rank that sends most. Seconds are medians of "
        f"{ROUNDS} decodes; this machine has 2 cores, so more than 2 ranks are not faster here.",
    ]
    for subject in subjects():
        text += [
            "",
            f"## {subject.title}",
            "",
            "| ranks | peak MiB | share | sent MiB | s |",
            "|---:|---:|---:|---:|---:|",
        ]
        alone = 0
        for ranks in RANKS:
            peaks, sent, seconds = measure(subject, ranks)
            alone = alone or max(peaks)
            text.append(
                f"| {ranks} | {max(peaks) / MEBIBYTE:.1f} | {max(peaks) / alone:.2f} | {max(sent) / MEBIBYTE:.1f} | "
                f"{seconds:.2f} |"
            )
            print(subject.title, text[-1], flush=True)
    (REPO / "docs" / "vae.md").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
