"""How many operations blocks start on a device, as the dry run counts them: `tests/dry` holds these numbers to it."""

from __future__ import annotations

from collections.abc import Mapping

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
"""The median of them, for blocks of other classes."""

ULYSSES = 5
"""What Ulysses adds to an attention: three kernels and two all-to-alls."""

CHUNK = 6
"""What each further chunk of heads adds to that: three kernels, attention's own, and two all-to-alls."""

FP8 = 27
"""What an exchange in fp8 adds to an attention under Ulysses: eleven kernels to pack its operands, ten for its result, and
three to unpack each."""

FP8_TRAFFIC = 30
"""Bytes that packing and unpacking read and write for each value, in between in fp32."""

RING = 3
RING_HOP = 8
"""What Ring adds to an attention, and each of its hops: seven kernels and a transfer."""

PATCHED = 4
"""The most that keys and values of other patches add to an attention."""


def of_a_block(kind: str) -> int:
    """Operations of a block of this class."""
    return OF_A_BLOCK.get(kind, MIDDLING)
