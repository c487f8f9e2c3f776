"""What the cost model is told: the shapes of models, how fast devices and links are, and how the software drives them.

Figures marked "fitted" come from the one- and two-GPU rows of xDiT's published measurements
(`benchmarks/plan_predictions.py --fit` finds them again); the others are data sheets times a usual efficiency.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..errors import Refused
from .plan import ModelLimits

GIGA = 1e9
TERA = 1e12
MICRO = 1e-6


@dataclass(frozen=True)
class ModelShape:
    """A transformer's shape.

    `double_weights` and `single_weights` are the parameters of one block, `other_weights` those outside the blocks;
    `token_weights` those that multiply each token in a block. A token covers `pixels` x `pixels` pixels and, in models of
    videos, `latent_frames` frames of a latent that has one every 4 video frames (0: the model makes pictures). `channels`
    are the latent's, per token. `joint_text` is false where text tokens are only attended to (cross-attention) and take
    no part in the sequence. `guided`: usually sampled with a negative branch. `embeds_whole`: every rank embeds the whole
    picture before it takes its tokens.
    """

    name: str
    hidden: int
    heads: int
    double_blocks: int
    single_blocks: int
    double_weights: int
    single_weights: int
    other_weights: int
    token_weights: int
    channels: int
    pixels: int = 16
    latent_frames: int = 0
    text: int = 512
    joint_text: bool = True
    guided: bool = False
    embeds_whole: bool = False

    @property
    def blocks(self) -> int:
        """Blocks of both kinds."""
        return self.double_blocks + self.single_blocks

    @property
    def limits(self) -> ModelLimits:
        """What a plan for this model may be."""
        return ModelLimits(self.heads, self.head_dim, self.blocks)

    @property
    def parameters(self) -> int:
        """Parameters in all."""
        return self.weights(0, self.blocks) + self.other_weights

    @property
    def head_dim(self) -> int:
        """Features of one attention head."""
        return self.hidden // self.heads

    def weights(self, first: int, count: int) -> int:
        """Parameters of `count` blocks from the `first` one on; double blocks come first."""
        double = max(0, min(first + count, self.double_blocks) - first)
        return double * self.double_weights + (count - double) * self.single_weights

    def rows(self, height: int, frames: int = 1) -> int:
        """Rows of image tokens of a picture or video, all frames together."""
        latents = math.ceil(((frames - 1) // 4 + 1) / self.latent_frames) if self.latent_frames else 1
        return latents * math.ceil(height / self.pixels)

    def image_tokens(self, width: int, height: int, frames: int = 1) -> int:
        """Image tokens of a picture or video of this size in pixels."""
        return self.rows(height, frames) * math.ceil(width / self.pixels)


CONTEXT_BYTES = 0.8e9
"""Device memory that the CUDA context, NCCL and the kernels take (typical, bytes)."""


@dataclass(frozen=True)
class Device:
    """One accelerator: effective rates, not peaks.

    `matmul` and `attention` in FLOP/s (bf16), `bandwidth` in bytes/s, `memory` in bytes, `launch` in seconds of host
    time for each operation started from diffusers' modules, `context` in bytes that a worker needs besides the model,
    `connection` in bytes for each pair of GPUs of a communicator, where `context` does not have them.
    """

    matmul: float
    attention: float
    bandwidth: float
    memory: float
    launch: float
    context: float = CONTEXT_BYTES
    connection: float = 0.0


@dataclass(frozen=True)
class Level:
    """One level of the tree that connects the ranks, innermost first.

    `size` ranks can reach each other at this level or below. Each group of the level below (at the innermost level:
    each rank) is attached by one port of `bandwidth` bytes/s in each direction, which its ranks share. A collective
    or a hop that crosses this level takes `latency` seconds on top.
    """

    size: int
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Software:
    """How many operations, and how much memory traffic besides matmul and attention, an implementation has.

    Launches are counts of operations that start work: in one `double` and `single` block, in one `all_to_all` with its
    re-layouts, in one `ring_call` besides its hops, in the attention and merge of one `ring_block`, in one
    `ring_transfer`. `passes` are readings or writings of all features of a token in one block; `merge_bytes` is the
    traffic of merging one element of a partial attention. `all_to_alls` is how many a block's attention makes.
    `hop` is seconds of device idle time in each ring hop. `launch` is the host time of an operation, as a part of the
    device's.
    """

    double: int
    single: int
    all_to_all: int
    ring_call: int
    ring_block: int
    ring_transfer: int
    all_to_alls: int
    passes: float
    merge_bytes: float
    hop: float
    launch: float


@dataclass(frozen=True)
class Profile:
    """A machine and the software on it. `overlap` is the part of a transfer that really hides behind compute."""

    name: str
    device: Device
    levels: tuple[Level, ...]
    overlap: float
    software: Software


# Operations counted by a dispatch mode over this project's FLUX blocks, and read off `attention/parallel.py`. Their host
# time was measured on one CPU core with tiny tensors: 0.7 of the same under diffusers' modules.
EAGER = Software(
    double=95,
    single=48,
    all_to_all=4,
    ring_call=4,
    ring_block=8,
    ring_transfer=3,
    all_to_alls=2,
    passes=157,
    merge_bytes=50,
    hop=99 * MICRO,
    launch=0.7,
)

# The same for diffusers' FLUX blocks under xDiT: counted by a dispatch mode; its attention read off its source. Its merge
# of partial attentions is TorchScript and counts as one.
XDIT_EAGER = replace(EAGER, double=94, single=49, ring_call=8, ring_block=3, ring_transfer=6, all_to_alls=4, launch=1.0)

# torch.compile fuses what is between matmuls, attention and collectives, and starts it without Python: 7 µs each.
XDIT_COMPILED = replace(XDIT_EAGER, double=30, single=12, passes=8, merge_bytes=30, launch=0.2)

H100 = Device(matmul=546 * TERA, attention=409 * TERA, bandwidth=2.8 * TERA, memory=80 * GIGA, launch=36 * MICRO)
A100 = Device(matmul=213 * TERA, attention=160 * TERA, bandwidth=1.7 * TERA, memory=80 * GIGA, launch=36 * MICRO)
L40 = Device(matmul=166 * TERA, attention=150 * TERA, bandwidth=0.7 * TERA, memory=48 * GIGA, launch=36 * MICRO)
RTX_4090 = Device(matmul=150 * TERA, attention=140 * TERA, bandwidth=0.85 * TERA, memory=24 * GIGA, launch=36 * MICRO)

NVLINK4 = Level(8, 300 * GIGA, 52 * MICRO)
NVLINK3 = Level(8, 200 * GIGA, 52 * MICRO)
INFINIBAND = Level(1024, 8 * 22 * GIGA, 60 * MICRO)  # a 200 Gbit port for each GPU of a node

# Two GPUs share a root port, two pairs a socket; the port of a socket is the link to the other one.
PCIE4 = (
    Level(2, 9.4 * GIGA, 60 * MICRO),
    Level(4, 9.4 * GIGA, 60 * MICRO),
    Level(8, 9.4 * GIGA, 70 * MICRO),
)

# Without peer-to-peer everything is copied through host memory: half the speed, longer start.
HOST_COPY = tuple(Level(level.size, level.bandwidth / 2, 2 * level.latency) for level in PCIE4)

PCIE_OVERLAP = 0.63  # fitted

ETHERNET_100 = Level(1024, 11 * GIGA, 80 * MICRO)  # one 100 Gbit port a node, shared by its GPUs
ETHERNET_10 = Level(1024, 1.1 * GIGA, 150 * MICRO)


def _profiles() -> dict[str, Profile]:
    found = (
        Profile("h100-nvlink", H100, (NVLINK4, INFINIBAND), 1.0, EAGER),
        Profile("a100-nvlink", A100, (NVLINK3, INFINIBAND), 1.0, EAGER),
        Profile("l40-pcie", L40, (*PCIE4, ETHERNET_100), PCIE_OVERLAP, EAGER),
        Profile("4090-no-p2p", RTX_4090, (*HOST_COPY, ETHERNET_10), PCIE_OVERLAP, EAGER),
        Profile("2x8-100gbit", A100, (NVLINK3, ETHERNET_100), 1.0, EAGER),
        Profile("2x8-10gbit", A100, (NVLINK3, ETHERNET_10), 1.0, EAGER),
    )
    return {profile.name: profile for profile in found}


def _models() -> dict[str, ModelShape]:
    square = 3072**2
    flux = ModelShape(
        name="flux-dev",
        hidden=3072,
        heads=24,
        double_blocks=19,
        single_blocks=38,
        double_weights=36 * square,
        single_weights=15 * square,
        other_weights=70_000_000,
        token_weights=12 * square,
        channels=64,
    )
    cog = ModelShape(
        name="cogvideox-5b",
        hidden=3072,
        heads=48,
        double_blocks=0,
        single_blocks=42,
        double_weights=0,
        single_weights=12 * square + 12 * 512 * 3072,
        other_weights=40_000_000,
        token_weights=12 * square,
        channels=64,
        latent_frames=1,
        text=226,
        guided=True,
    )
    found = (
        flux,
        replace(flux, name="flux-schnell", text=256),
        replace(
            cog,
            name="cogvideox-2b",
            hidden=1920,
            heads=30,
            single_blocks=30,
            single_weights=12 * 1920**2 + 12 * 512 * 1920,
            token_weights=12 * 1920**2,
        ),
        cog,
        replace(cog, name="cogvideox1.5-5b", latent_frames=2, channels=128),
        ModelShape(
            name="pixart-alpha",
            hidden=1152,
            heads=16,
            double_blocks=0,
            single_blocks=28,
            double_weights=0,
            single_weights=16 * 1152**2,
            other_weights=15_000_000,
            token_weights=14 * 1152**2,  # the cross-attention's keys and values are made of the text alone
            channels=32,
            text=120,
            joint_text=False,
            guided=True,
        ),
    )
    return {model.name: model for model in found}


def profile(name: str) -> Profile:
    """A hardware profile by name. Raises Refused for an unknown one."""
    known = _profiles()
    if name not in known:
        raise Refused(f"the hardware profile {name!r} is unknown: use {', '.join(known)}.")
    return known[name]


def profile_names() -> list[str]:
    """Names that `profile` knows."""
    return list(_profiles())


def model_shape(name: str) -> ModelShape:
    """A model's shape by name, as in its public configuration. Raises Refused for an unknown one."""
    known = _models()
    if name not in known:
        raise Refused(f"the model {name!r} is unknown: use {', '.join(known)}.")
    return known[name]


def model_names() -> list[str]:
    """Names that `model_shape` knows."""
    return list(_models())
