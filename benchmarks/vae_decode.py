"""Memory and time of decoding on several ranks, on CPUs with gloo and one thread a rank.

Writes docs/vae.md. Run from the repository root: OMP_NUM_THREADS=1 python -m benchmarks.vae_decode
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_backend.comm.communicator import Communicator
from parallel_backend.comm.meter import Meter
from parallel_backend.vae import Autoencoder
from parallel_backend.vae.cogvideox import CogVideoXAutoencoder, CogVideoXConfig
from parallel_backend.vae.comfyui import ComfyAutoencoder
from parallel_backend.vae.rows import Slab, slab_of
from scripts.comfyui import REPO
from tests.allocations import peak_bytes
from tests.ranks import run_ranks
from tests.tiny_vae import random_weights
from tests.vae.comfy_vaes import KINDS, build

RANKS = (1, 2, 3, 4)
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
    """A clip by both schedules, a picture, and one of ComfyUI's own."""
    video = CogVideoXAutoencoder(CogVideoXConfig((32, 64, 64, 128), 3, 16))
    module = video.module.to_empty(device="cpu")
    module.load_state_dict(random_weights(module, seed=0))
    image = ComfyAutoencoder(build("flux", ch=64, num_res_blocks=2), KINDS["flux"].scale)
    wan = ComfyAutoencoder(build("wan", dim=32), KINDS["wan"].scale)
    ltx = ComfyAutoencoder(build("ltx095", decoder_base_channels=32), KINDS["ltx095"].scale)
    clip = torch.randn(1, 16, 5, 12, 8)
    return [
        Subject("CogVideoX, 17 frames of 64x96, original batches", video, clip, "original"),
        Subject("CogVideoX, 17 frames of 64x96, ComfyUI's batches", video, clip, "comfyui"),
        Subject("FLUX, 192x192", image, torch.randn(1, 16, 24, 24), "original"),
        Subject("Wan 2.1, 9 frames of 96x64", wan, torch.randn(1, 16, 3, 12, 8), "original"),
        Subject("LTX-Video 0.9.5, 17 frames of 384x128", ltx, torch.randn(1, 128, 3, 12, 4), "original"),
    ]


@torch.inference_mode()
def decode(subject: Subject, axis: Communicator) -> None:
    """Decode once; the first rank gets all pixels."""
    latent = slab_of(subject.latent, axis)

    def give(piece: Slab) -> None:
        piece.whole()

    subject.autoencoder.decode(latent, subject.schedule, lambda layers=1: None, give)


def axis_of(group: dist.ProcessGroup | None, meter: Meter) -> Communicator:
    """All ranks of a group, or this one alone."""
    return Communicator("rows", group, torch.device("cpu"), False, meter)


def footprint(subject: Subject, ranks: int) -> tuple[list[int], list[int]]:
    """Each rank's peak and bytes sent. The peak is activations, what is exchanged, and pixels; no weights."""

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
    """Seconds of the quickest decode by the clock, and of the core that computes it on the busiest rank, waiting left out."""

    clock: float
    processor: float


def times(subject: Subject) -> tuple[Times, Times]:
    """Of one rank and of two, which take turns, so that both meet the same machine. The first decode is not counted."""

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


def main() -> None:
    """Measure and write."""
    text = [
        "# Decoding on several ranks",
        "",
        "Written by `OMP_NUM_THREADS=1 python -m benchmarks.vae_decode`: random autoencoders in fp32 on a CPU of 2 cores "
        "(gloo, one thread a rank); CogVideoX's with a quarter of its "
        "channels, FLUX's with half, Wan's with a third, LTX-Video's with a quarter (these three are ComfyUI's own code). "
        "*Peak*: bytes of tensors alive "
        "at the same time at the most, on each rank, without weights; the first rank also gathers the pixels. *Share*: the "
        "largest against one rank's. *Sent*: by the rank that sends most. Seconds are the shortest of "
        f"{ROUNDS} decodes, one rank and two taking turns in one run; both by the clock, while other programs used the "
        "machine too, and of the busiest rank's computing thread, without its waiting for a core or for its neighbour. "
        "On a CPU torch's conv3d changes kernels with the size (one thread: 0.038 s for an input of [1, 32, 10, 66, 98], "
        "0.082 s for half of its height), so clips differ in whether one rank or two are faster.",
        "",
        "CogVideoX's is not ComfyUI's code: `original`, the default, is diffusers' result. ComfyUI's own module, which gives "
        "the other, over rows of the same clip had a peak of 67.9 MiB on one rank and 33.9 on two, which sent 5.6 MiB: a "
        "fifth and two fifths more than ours (its norms enlarge the latent before they convolve it).",
        "",
        "ComfyUI's decoders of clips hand out frames as they make them, so that a rank holds about eight of them "
        "however long the clip is, and the host has the first ones while the next are decoded. Wan 2.1 "
        "(Qwen-Image's too) makes two at a time, Wan 2.2 four, HunyuanVideo and 1.5 eight, LTX-Video as many as "
        "its own limit of bytes allows: a small clip is made at once. CogVideoX's come batch by batch. "
        "MiniMax-H3's tiles are joined whole, so its frames come at the end. Before they were handed out, 81 "
        "frames of 96x64 by the Wan 2.1 below had a peak of 32.1 MiB on one rank, 17.6 on two and 8.8 on four; "
        "now 27.1, 15.3 and 8.0, as 9 frames have. At full size in bf16, counted without a GPU "
        "([dry-run.md](dry-run.md)), 81 frames of 1280x720 took 8640 MB on one rank and 2119 on four, and now "
        "8242 and 2022.",
    ]
    for subject in subjects():
        one, two = times(subject)
        text += [
            "",
            f"## {subject.title}",
            "",
            f"One rank {one.clock:.2f} s by the clock and {one.processor:.2f} s of computing; two ranks {two.clock:.2f} s and "
            f"{two.processor:.2f} s: {one.clock / two.clock:.2f} and {one.processor / two.processor:.2f} times as fast.",
            "",
            "| ranks | peak MiB of each rank | share | sent MiB |",
            "|---:|---|---:|---:|",
        ]
        print("\n".join(text[-5:]), flush=True)
        alone = 0
        for ranks in RANKS:
            peaks, sent = footprint(subject, ranks)
            alone = alone or max(peaks)
            each = ", ".join(f"{peak / MEBIBYTE:.1f}" for peak in peaks)
            text.append(f"| {ranks} | {each} | {max(peaks) / alone:.2f} | {max(sent) / MEBIBYTE:.1f} |")
            print(text[-1], flush=True)
    (REPO / "docs" / "vae.md").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
