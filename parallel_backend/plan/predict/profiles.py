"""What the cost model is told: the shape of a model, how fast devices and links are, and how the software drives them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..plan import ModelLimits

OF_A_BLOCK: Mapping[str, int] = {
    "CogVideoXBlock": 59,
    "DiTBlock": 36,
    "DoubleStreamBlock": 43,
    "JointTransformerBlock": 26,
    "QwenImageTransformerBlock": 49,
    "SingleStreamBlock": 15,
    "WanAttentionBlock": 31,
}
"""Kernels of one block in this project's code, by the block's class: on one rank, eager, the most of any model."""

MIDDLING = 36
"""The median of OF_A_BLOCK's numbers, for blocks of other classes."""

ULYSSES = 5
"""Operations that Ulysses adds to an attention: three kernels and two all-to-alls."""

CHUNK = 6
"""Operations that each further chunk of heads adds under Ulysses: three kernels, one attention and two all-to-alls."""

FP8 = 27
"""Operations that an exchange in fp8 adds to an attention under Ulysses: eleven kernels to pack its operands, ten for its result,
and three to unpack each."""

FP8_TRAFFIC = 30
"""Bytes that packing and unpacking read and write for each value, in between in fp32."""

RING = 3
RING_HOP = 8
"""Operations that Ring adds to an attention for each of its hops: seven kernels and a transfer."""

PATCHED = 4
"""The most that keys and values of other patches add to an attention."""


def of_a_block(kind: str) -> int:
    """Operations of a block of this class."""
    return OF_A_BLOCK.get(kind, MIDDLING)


@dataclass(frozen=True)
class ModelShape:
    """A transformer's shape.

    Attributes:
        name: the model's, as users know it.
        hidden: the width of a token.
        heads: of queries.
        double_blocks, single_blocks: how many of each kind; a model with one kind has single ones.
        double_weights, single_weights: parameters of one block.
        other_weights: those outside the blocks.
        token_weights: those that multiply each token in a block.
        channels: the latent's, per token.
        pixels: a token covers so many pixels, squared.
        latent_frames: in models of videos, the frames that a token covers of a latent that has one every 4 video frames; 0
            where the model makes pictures.
        text: tokens of a usual prompt.
        joint_text: false where text is only attended to (cross-attention) and takes no part in the sequence.
        guided: usually sampled with a negative branch.
        embeds_whole: every rank embeds the whole picture before it takes its tokens.
        copies: the features that a block holds at its peak for each token, in units of `hidden`.
        attentions: how often tokens of all ranks attend to each other in a block, on average.
        whole_picture: blocks, or what comes behind them, need the whole picture at once, which PipeFusion does not bring
            together.
        double_operations, single_operations: what one block starts on one rank's device, as its code is.
        kv_heads: heads of keys and values; 0 where there are as many as `heads`.
        unsharded: a forward is not split, and plans split its prompts and its batch (`plan/unsharded.py`).
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
    copies: float = 16.0
    attentions: float = 1.0
    whole_picture: bool = False
    double_operations: int = 0
    single_operations: int = MIDDLING
    kv_heads: int = 0
    unsharded: bool = False

    @property
    def blocks(self) -> int:
        """Blocks of both kinds."""
        return self.double_blocks + self.single_blocks

    @property
    def limits(self) -> ModelLimits:
        """What a plan for this model may be."""
        return ModelLimits(self.heads, self.head_dim, self.blocks, self.whole_picture, self.unsharded)

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
        double = self._doubles(first, count)
        return double * self.double_weights + (count - double) * self.single_weights

    def operations(self, first: int, count: int) -> int:
        """Operations that `count` blocks start from the `first` one on."""
        double = self._doubles(first, count)
        return double * self.double_operations + (count - double) * self.single_operations

    def _doubles(self, first: int, count: int) -> int:
        return max(0, min(first + count, self.double_blocks) - first)

    def rows(self, height: int, frames: int = 1) -> int:
        """Rows of image tokens of a picture or video, all frames together."""
        latents = math.ceil(((frames - 1) // 4 + 1) / self.latent_frames) if self.latent_frames else 1
        return latents * math.ceil(height / self.pixels)

    def image_tokens(self, width: int, height: int, frames: int = 1) -> int:
        """Image tokens of a picture or video of this size in pixels."""
        return self.rows(height, frames) * math.ceil(width / self.pixels)


BESIDE_LAYERS = 5
"""Features that a block holds for a token beside the widest layer's input and output, in units of the hidden size.

The residual, what is normed and modulated, the attention's output and the copies in between. Counted in tests/dry.
"""


def copies_of(hidden: int, width_in: int, width_out: int, gated: int = 0) -> float:
    """`ModelShape.copies` of blocks whose widest layers take and give so many features a token.

    Args:
        gated: the width of a feed-forward layer whose gate is multiplied in: both, the gate's activation and the product
            are held at once.
    """
    return BESIDE_LAYERS + (max(width_in, 2 * gated) + max(width_out, 2 * gated)) / hidden


UNPACKING = 30
"""Bytes that are read and written in between where a value of one of GGUF's blocks is unpacked, in fp32.

Of its types 16 (Q8_0) to 50 (Q3_K), and the median 30, by the operations of `weights/formats.py`.
"""


def expansion_of(stored: float, element: int, unpacked: bool) -> float:
    """Bytes read and written where a weight of so many bytes is expanded to `element` bytes (`Job.expansion`)."""
    return stored + element + UNPACKING * unpacked


CONTEXT_BYTES = 0.85e9
"""Device memory that the CUDA context, NCCL and the kernels take (typical, bytes)."""

HOST_BANDWIDTH = 20e9
"""Bytes/s from pinned host memory (typical)."""


WAVE = 128 * 132
"""Queries that an attention kernel works on at once: 128 on each of an H100's multiprocessors; others have 82 to 170 of them."""


@dataclass(frozen=True)
class Device:
    """One accelerator: effective rates, not peaks.

    `matmul` and `attention` in FLOP/s (bf16), `bandwidth` in bytes/s, `memory` in bytes, `launch` in seconds of host
    time for each operation started from diffusers' modules, `context` in bytes that a worker needs besides the model,
    `connection` in bytes for each pair of GPUs of a communicator, where `context` does not have them, `host_bandwidth` in
    bytes/s from pinned host memory while all of the machine's copy, `wave` the queries of all heads that its attention
    kernel works on at once: fewer take as long.
    """

    matmul: float
    attention: float
    bandwidth: float
    memory: float
    launch: float
    context: float = CONTEXT_BYTES
    connection: float = 0.0
    host_bandwidth: float = HOST_BANDWIDTH
    wave: int = WAVE


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

    `ulysses`, `ring`, `ring_hop` and `patched` are operations that start work and that an attention has more of: under
    Ulysses and in each further chunk of its heads, under Ring and in each of its hops, and where patches find the keys of
    others kept; `chunk` is 0 where heads are never exchanged in chunks. `all_to_alls` is how many a
    block's attention makes. `passes` are readings or writings of all features of a token in one block; `merge_bytes` is the
    traffic of merging one element of a partial attention. `hop` is seconds of device idle time in each ring hop. `launch` is
    the host time of a block's operation, as a part of the device's, `added_launch` that of those which an attention has more of.
    """

    ulysses: int
    chunk: int
    ring: int
    ring_hop: int
    patched: int
    all_to_alls: int
    passes: float
    merge_bytes: float
    hop: float
    launch: float
    added_launch: float


@dataclass(frozen=True)
class ForwardTime:
    """Seconds of one forward: `start` whatever its batch is, and `item` for each item of it."""

    start: float
    item: float


@dataclass(frozen=True)
class Profile:
    """A machine and the software on it. `overlap` is the part of a transfer that really hides behind compute.

    `paces` are the ranks' speeds in units of `device`'s, the slowest; nothing where all are equally fast. `free` are the bytes
    that ranks may take of their devices; of ranks that are not in it those are `device.memory`. `forwards` are each rank's
    times for a forward of a model that is not spread. `compiled` is the software once it compiles its blocks, None where that
    is not to be compared.
    """

    name: str
    device: Device
    levels: tuple[Level, ...]
    overlap: float
    software: Software
    paces: tuple[float, ...] = ()
    free: tuple[float, ...] = ()
    forwards: tuple[ForwardTime, ...] = ()
    compiled: Software | None = None

    def memory(self, rank: int) -> float:
        """Bytes that a rank may take of its device."""
        return self.free[rank] if rank < len(self.free) else self.device.memory

    def pace(self, rank: int) -> float:
        """A rank's speed in units of the slowest's."""
        return self.paces[rank] if self.paces else 1.0
