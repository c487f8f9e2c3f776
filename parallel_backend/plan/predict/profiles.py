"""The inputs of the cost model: the shape of a model, the sizes of a denoise, and the speed of devices and links."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..plan import ModelLimits
from .kernel_counts import MIDDLING, MIDDLING_PASSES


@dataclass(frozen=True)
class ModelShape:
    """A transformer's shape.

    Attributes:
        name: the model's name for users.
        hidden: the hidden size, which is the width of a token.
        heads: the number of query heads.
        double_blocks: the number of double blocks.
        single_blocks: the number of single blocks. A model with one kind of blocks has only single blocks.
        double_weights: parameters of one double block.
        single_weights: parameters of one single block.
        other_weights: parameters outside the blocks.
        token_weights: parameters of a block that multiply each token.
        channels: latent values of one token.
        pixels: a token covers a square of this many pixels a side.
        token_frames: the frames of a video that a token covers after the first frame. 0: the model makes pictures.
        text: text tokens of a usual prompt.
        joint_text: text is part of the sequence, rather than only attended to (cross-attention).
        guided: the model is usually sampled with a negative branch.
        embeds_whole: every rank embeds the whole picture before it takes its tokens.
        copies: the features that a block holds per token at its peak, in units of `hidden`.
        attentions: the number of attention calls between tokens of all ranks in a block, on average.
        whole_picture: blocks, or the layers after them, need the whole picture at once, so PipeFusion is impossible.
        double_operations: operations that one double block starts on one rank's device, in eager mode.
        single_operations: operations that one single block starts on one rank's device, in eager mode.
        passes: the number of times that a block reads or writes all features of a token, in eager mode, on average over the
            blocks, besides matmuls and attention.
        kv_heads: the number of heads of keys and values. 0: as many as `heads`.
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
    token_frames: float = 0.0
    text: int = 512
    joint_text: bool = True
    guided: bool = False
    embeds_whole: bool = False
    copies: float = 16.0
    attentions: float = 1.0
    whole_picture: bool = False
    double_operations: int = 0
    single_operations: int = MIDDLING
    passes: float = MIDDLING_PASSES
    kv_heads: int = 0
    unsharded: bool = False

    @property
    def blocks(self) -> int:
        """Return the number of blocks of both kinds."""
        return self.double_blocks + self.single_blocks

    @property
    def limits(self) -> ModelLimits:
        """Return the limits of this model to plans."""
        return ModelLimits(self.heads, self.head_dim, self.blocks, self.whole_picture, self.unsharded)

    @property
    def parameters(self) -> int:
        """Return the number of all parameters."""
        return self.weights(0, self.blocks) + self.other_weights

    @property
    def head_dim(self) -> int:
        """Return the width of one attention head."""
        return self.hidden // self.heads

    def weights(self, first: int, count: int) -> int:
        """Return the parameters of `count` blocks, beginning with block `first`. Double blocks come before single blocks."""
        double = self._doubles(first, count)
        return double * self.double_weights + (count - double) * self.single_weights

    def operations(self, first: int, count: int) -> int:
        """Return the operations that `count` blocks start, beginning with block `first`."""
        double = self._doubles(first, count)
        return double * self.double_operations + (count - double) * self.single_operations

    def _doubles(self, first: int, count: int) -> int:
        return max(0, min(first + count, self.double_blocks) - first)

    def rows(self, height: int, frames: int = 1) -> int:
        """Return the rows of image tokens of a picture or video of this height in pixels, all frames together."""
        times = int((frames - 1) / self.token_frames) + 1 if self.token_frames else 1
        return times * math.ceil(height / self.pixels)

    def image_tokens(self, width: int, height: int, frames: int = 1) -> int:
        """Return the number of image tokens of a picture or video of this size in pixels."""
        return self.rows(height, frames) * math.ceil(width / self.pixels)


@dataclass(frozen=True)
class DenoiseJob:
    """The sizes of a denoise.

    Attributes:
        image_tokens: image tokens of one batch item.
        text_tokens: text tokens of one batch item.
        batch: the number of batch items.
        has_uncond: the denoise has a negative branch.
        steps: the number of steps.
        element: bytes of one element of activations.
        weight_element: bytes of one weight, which may be less in fp8 and GGUF.
        expansion: bytes read and written to expand one weight at each use, on average over all weights; 0 without expansion.
        expanded: bytes of the largest expanded matrix; 0 without expansion.
        multiplied: the dtype of quantised weights that are multiplied without expansion; empty for bf16.
        item_bytes: bytes that a forward of an unsharded model needs for each batch item.
    """

    image_tokens: int
    text_tokens: int
    batch: int = 1
    has_uncond: bool = False
    steps: int = 28
    element: int = 2
    weight_element: float = 2
    expansion: float = 0.0
    expanded: int = 0
    multiplied: str = ""
    item_bytes: float = 0.0


BESIDE_LAYERS = 5
"""Features that a block holds per token besides the widest layer's input and output, in units of the hidden size.

They are the residual, the normed and the modulated tokens, attention's output, and the copies in between. `tests/dry` counts
them.
"""


def copies_of(hidden: int, width_in: int, width_out: int, gated: int = 0) -> float:
    """Return `ModelShape.copies` for blocks with these layers.

    Args:
        hidden: the hidden size.
        width_in: the features per token that the widest layer takes.
        width_out: the features per token that the widest layer returns.
        gated: the width of a feed-forward layer with a gate. A block holds the gate's activation and the product at once.
    """
    return BESIDE_LAYERS + (max(width_in, 2 * gated) + max(width_out, 2 * gated)) / hidden


UNPACKING = 30
"""Bytes of intermediate results, in fp32, that unpacking one value of a GGUF block reads and writes.

By the operations of `weights/formats.py`, the types need 16 (Q8_0) to 50 (Q3_K), and the median is 30.
"""


def expansion_of(stored: float, element: int, unpacked: bool) -> float:
    """Return the bytes read and written to expand one weight (`DenoiseJob.expansion`).

    Args:
        stored: bytes of the stored weight.
        element: bytes of the expanded weight.
        unpacked: the weight is unpacked from a GGUF block.
    """
    return stored + element + UNPACKING * unpacked


CONTEXT_BYTES = 0.85e9
"""Device memory that the CUDA context, NCCL and the kernels take (typical, bytes)."""

HOST_BANDWIDTH = 20e9
"""Bytes/s from pinned host memory (typical)."""


REACHED = 0.93
"""The share of a short-running kernel's rate that a whole model reaches (fitted on the L40)."""

WAVE = 128 * 132
"""Queries that an attention kernel computes at once: 128 on each of an H100's 132 multiprocessors. Others have 82 to 170."""


@dataclass(frozen=True)
class Device:
    """One accelerator, with the rates of kernels that run alone for a short time.

    Attributes:
        matmul: FLOP/s of matmul in bf16.
        attention: FLOP/s of attention in bf16.
        bandwidth: bytes/s of device memory.
        memory: bytes of device memory.
        launch: seconds of host time for each operation that diffusers' modules start.
        context: bytes of device memory that a worker needs besides the model.
        connection: bytes for each peer of a communicator, unless `context` includes them.
        host_bandwidth: bytes/s from pinned host memory while all GPUs of the machine copy.
        wave: queries, over all heads, that the attention kernel computes at once. Fewer queries take as long.
        reached: the share of the rates of matmul and attention that a whole model reaches.
        quantised: FLOP/s of matmul by the dtype of quantised weights. Weights of other dtypes are expanded to bf16.
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
    reached: float = REACHED
    quantised: Mapping[str, float] = field(default_factory=dict)

    def matmul_rate(self, dtype: str) -> float:
        """Return the FLOP/s of a model's matmuls with weights of a dtype."""
        return self.quantised.get(dtype, self.matmul) * self.reached

    @property
    def attention_rate(self) -> float:
        """Return the FLOP/s of a model's attention."""
        return self.attention * self.reached


@dataclass(frozen=True)
class Level:
    """One level of the tree that connects the ranks.

    Each group of the next inner level (at the innermost level, each rank) has one port into this level. The ranks of a group
    share its port.

    Attributes:
        size: the number of ranks that can reach each other at this level or further inside.
        bandwidth: bytes/s of a port in each direction.
        latency: seconds that a collective or a hop across this level takes in addition.
    """

    size: int
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class ForwardTime:
    """The seconds of one forward: `start` for any batch, plus `item` for each batch item."""

    start: float
    item: float


@dataclass(frozen=True)
class Profile:
    """A machine, and how the workers run on it.

    Attributes:
        name: the machine's name.
        device: the slowest device.
        levels: the links between ranks, innermost first.
        overlap: the fraction of a transfer that really overlaps with compute.
        paces: the ranks' speeds, relative to `device`. Empty: all are equally fast.
        free: bytes that each rank may use of its device. Further ranks may use `device.memory`.
        forwards: each rank's times for a forward of an unsharded model.
        compiled: torch.compile fuses the operations between matmuls, attention and collectives.
        compares_compiled: tables and advice also tell the time with compiled blocks.
    """

    name: str
    device: Device
    levels: tuple[Level, ...]
    overlap: float
    paces: tuple[float, ...] = ()
    free: tuple[float, ...] = ()
    forwards: tuple[ForwardTime, ...] = ()
    compiled: bool = False
    compares_compiled: bool = False

    def memory(self, rank: int) -> float:
        """Return the bytes that a rank may use of its device."""
        return self.free[rank] if rank < len(self.free) else self.device.memory

    def pace(self, rank: int) -> float:
        """Return a rank's speed, relative to the slowest device."""
        return self.paces[rank] if self.paces else 1.0
