"""Measures memory and time of decoding on several ranks, on CPUs with gloo and one thread per rank.

Writes docs/guide/vae.md. Run from the repository root: OMP_NUM_THREADS=1 python -m benchmarks.vae_decode. With --counts it
counts only memory and bytes anew, which other programs do not disturb, and keeps the times.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_backend.comm.communicator import Communicator
from parallel_backend.comm.meter import Meter
from parallel_backend.vae import Autoencoder
from parallel_backend.vae.cogvideox import CogVideoXAutoencoder, CogVideoXAutoencoderConfig
from parallel_backend.vae.comfyui import ComfyAutoencoder
from parallel_backend.vae.rows import Slab, slab_of
from scripts.comfyui import REPO
from tests.support.allocations import peak_bytes
from tests.support.ranks import run_ranks
from tests.support.tiny.vae import random_weights
from tests.vae import tiles
from tests.vae.comfy_vaes import KINDS, build

RANKS = (1, 2, 3, 4)
ROUNDS = 3
MEBIBYTE = 1 << 20
PAGE = REPO / "docs" / "guide" / "vae.md"
TIMES = "## Time"


@dataclass(frozen=True)
class Subject:
    """An autoencoder and a latent to decode."""

    title: str
    autoencoder: Autoencoder
    latent: Tensor
    schedule: str = "original"
    timed: bool = False


def subjects() -> list[Subject]:
    """Return CogVideoX's autoencoder with both schedules, and each kind of ComfyUI's own. Some of them are timed."""
    video = CogVideoXAutoencoder(CogVideoXAutoencoderConfig((32, 64, 64, 128), 3, 16))
    module = video.module.to_empty(device="cpu")
    module.load_state_dict(random_weights(module, seed=0))
    clip = torch.randn(1, 16, 5, 12, 8)
    half: dict[str, Any] = {"ch": 64, "num_res_blocks": 2}

    def comfyuis(title: str, kind: str, latent: tuple[int, ...], timed: bool = False, **settings: Any) -> Subject:
        autoencoder = ComfyAutoencoder(build(kind, **settings), KINDS[kind].scale)
        return Subject(title, autoencoder, torch.randn(1, *latent), timed=timed)

    return [
        Subject("CogVideoX, 17 frames of 64x96, original batches", video, clip, timed=True),
        Subject("CogVideoX, 17 frames of 64x96, ComfyUI's batches", video, clip, "comfyui", timed=True),
        comfyuis("FLUX.1, 192x192", "flux", (16, 24, 24), timed=True, **half),
        comfyuis("Stable Diffusion, 192x192", "sd", (4, 24, 24), **half),
        comfyuis("FLUX.2, 192x192", "flux2", (128, 12, 12), **half),
        comfyuis(
            "HunyuanImage 2.1, 384x384",
            "hunyuan_image",
            (64, 12, 12),
            block_out_channels=[32, 64, 128, 128, 256, 256],
            num_res_blocks=2,
        ),
        comfyuis("Wan 2.1, 9 frames of 96x64", "wan", (16, 3, 12, 8), timed=True, dim=32),
        comfyuis("Wan 2.2, 9 frames of 192x128", "wan22", (48, 3, 12, 8), dim=40, dec_dim=64),
        comfyuis("HunyuanVideo, 9 frames of 96x64", "hunyuan", (16, 3, 12, 8), **half),
        comfyuis(
            "HunyuanVideo 1.5, 9 frames of 192x128",
            "hunyuan15",
            (32, 3, 12, 8),
            block_out_channels=[32, 64, 128, 256, 256],
            num_res_blocks=2,
        ),
        comfyuis(
            "LTX-Video 0.9.5, 17 frames of 384x128", "ltx095", (128, 3, 12, 4), timed=True, decoder_base_channels=32
        ),
        Subject(
            "MiniMax-H3, 30 frames of 112x80 in eight tiles",
            ComfyAutoencoder(tiles.autoencoder(), 16),
            tiles.inputs("clip")[0],
        ),
    ]


@torch.inference_mode()
def decode(subject: Subject, axis: Communicator) -> None:
    """Decode once. Rank 0 gets all pixels."""
    latent = slab_of(subject.latent, axis)

    def give(piece: Slab) -> None:
        piece.whole()

    subject.autoencoder.decode(latent, subject.schedule, lambda layers=1: None, give)


def axis_of(group: dist.ProcessGroup | None, meter: Meter) -> Communicator:
    """Return a communicator of all ranks of a group, or of this rank alone."""
    return Communicator("rows", group, torch.device("cpu"), False, meter)


def footprint(subject: Subject, ranks: int) -> tuple[list[int], list[int]]:
    """Return each rank's peak bytes and sent bytes. The peak has activations, exchanged data and pixels, but no weights."""

    def work(rank: int) -> tuple[int, int]:
        torch.set_grad_enabled(False)
        meter = Meter()
        axis = axis_of(dist.group.WORLD if ranks > 1 else None, meter)
        peak = peak_bytes(lambda: decode(subject, axis))
        return peak, meter.sent["rows"]

    peaks, sent = zip(*run_ranks(ranks, work, timeout=600), strict=True)
    return list(peaks), list(sent)


@dataclass(frozen=True)
class Times:
    """Seconds of the fastest decode: wall-clock, and CPU time of the computing thread on the busiest rank, without waiting."""

    clock: float
    processor: float


def times(subject: Subject) -> tuple[Times, Times]:
    """Return the times on one rank and on two.

    They take turns, so that both meet the same machine. The first decode does not count.
    """

    def work(rank: int) -> Tensor:
        torch.set_grad_enabled(False)
        axes = axis_of(None, Meter()), axis_of(dist.group.WORLD, Meter())
        seconds = torch.zeros(ROUNDS + 1, len(axes), 2)
        for turn in range(ROUNDS + 1):
            for which, axis in enumerate(axes):
                dist.barrier()
                clock, processor = time.perf_counter(), time.thread_time()
                if rank < axis.size:
                    decode(subject, axis)
                seconds[turn, which, 0] = time.perf_counter() - clock
                seconds[turn, which, 1] = time.thread_time() - processor
        return seconds

    slowest = torch.stack(run_ranks(2, work, timeout=600)).amax(0)
    one, two = slowest[1:].amin(0).tolist()
    return Times(*one), Times(*two)


INTRODUCTION = [
    "# Decoding on several ranks",
    "",
    "Each rank decodes some rows of the picture, and the first rank gathers the pixels. Ranks divide the "
    "memory, except MiniMax-H3's.",
    "",
    "- **Videos**: a rank sends each frame as soon as it is decoded, and has about eight of them in memory, "
    "however long the clip is. 81 frames of 1280x720 by Wan 2.1 in bf16, counted without a GPU ([dry "
    "runs](../measured/dry-run.md)), take 8242 MB on one rank and 2022 on four.",
    "- **MiniMax-H3** decodes in overlapping tiles, which the ranks divide. Each rank has the whole latent and "
    "one tile; the first joins the tiles and has the whole clip, so it needs more memory than one rank alone.",
    "- **CogVideoX**: `original`, the default, is diffusers' result; `comfyui` is that of ComfyUI's own module.",
    "",
    "Written by `OMP_NUM_THREADS=1 python -m benchmarks.vae_decode`: random autoencoders in fp32 with a part "
    "of their channels, on a CPU of 2 cores (gloo, one thread a rank).",
]


MEMORY = [
    "## Memory and bytes",
    "",
    "*Peak*: the most bytes of tensors on each rank, without weights. *Share*: the largest peak, as a fraction of "
    "one rank's. *Sent*: by the rank that sends most.",
    "",
    "| autoencoder | ranks | peak MiB of each rank | share | sent MiB |",
    "|---|---:|---|---:|---:|",
]

CLOCKED = [
    TIMES,
    "",
    f"Seconds are the shortest of {ROUNDS} decodes, by the clock and of the busiest rank's computing thread. On a CPU "
    "torch's conv3d changes kernels with the size, so clips differ in whether one rank or two are faster.",
    "",
    "| autoencoder | one rank: clock, computing | two ranks | times as fast |",
    "|---|---|---|---|",
]


def counted() -> Iterator[str]:
    """Yield the rows of memory and bytes."""
    for subject in subjects():
        alone = 0
        for ranks in RANKS:
            peaks, sent = footprint(subject, ranks)
            alone = alone or max(peaks)
            each = ", ".join(f"{peak / MEBIBYTE:.1f}" for peak in peaks)
            share = max(peaks) / alone
            yield f"| {subject.title} | {ranks} | {each} | {share:.2f} | {max(sent) / MEBIBYTE:.1f} |"


def clocked() -> Iterator[str]:
    """Yield the rows of times."""
    for subject in subjects():
        if subject.timed:
            one, two = times(subject)
            yield (
                f"| {subject.title} | {one.clock:.2f} s, {one.processor:.2f} s | {two.clock:.2f} s, {two.processor:.2f} s | "
                f"{one.clock / two.clock:.2f}, {one.processor / two.processor:.2f} |"
            )


def shown(rows: Iterator[str]) -> Iterator[str]:
    """Yield rows, and print each at once."""
    for row in rows:
        print(row, flush=True)
        yield row


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", action="store_true", help="count memory and bytes again, and keep the times")
    kept = parser.parse_args().counts
    text = [*INTRODUCTION, "", *MEMORY, *shown(counted()), ""]
    text += ["".join(PAGE.read_text().partition(TIMES)[1:])] if kept else [*CLOCKED, *shown(clocked())]
    PAGE.write_text("\n".join(text).rstrip() + "\n")


if __name__ == "__main__":
    main()
