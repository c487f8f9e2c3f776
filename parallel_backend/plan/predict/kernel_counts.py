"""The kernels that blocks and distributed attention launch, and what they read and write. `tests/dry` counts them again."""

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
"""Kernels that one block launches in this project's code, by its class: on one rank, eager, the largest number of any model."""

MIDDLING = 36
"""The median of OF_A_BLOCK's numbers, used for blocks of other classes."""

PASSES_OF_A_BLOCK: Mapping[str, int] = {
    "CogVideoXBlock": 96,
    "DiTBlock": 24,
    "DoubleStreamBlock": 49,
    "JointTransformerBlock": 43,
    "QwenImageTransformerBlock": 42,
    "SingleStreamBlock": 42,
    "WanAttentionBlock": 37,
}
"""Passes over the features of a token by the kernels of one block, matmuls and attention apart, by the block's class.

A pass reads or writes one value of each feature. The numbers are counted as those of OF_A_BLOCK are.
"""

MIDDLING_PASSES = 42
"""The median of PASSES_OF_A_BLOCK's numbers, used for blocks of other classes."""

ULYSSES = 5
"""Operations that Ulysses adds to an attention: three kernels and two all-to-alls."""

CHUNK = 6
"""Operations that each further chunk of heads adds under Ulysses: three kernels, one attention and two all-to-alls."""

FP8 = 27
"""Operations that an exchange in fp8 adds to an attention under Ulysses.

They are eleven kernels to pack the operands, ten to pack the result, and three to unpack each of these.
"""

FP8_TRAFFIC = 30
"""Bytes that packing and unpacking in fp8 read and write for each value, with intermediate results in fp32."""

RING = 3
"""Kernels that Ring adds to an attention besides its hops."""

RING_HOP = 8
"""Operations that Ring adds to an attention for each of its hops: seven kernels and a transfer."""

PATCHED = 4
"""The largest number of operations that cached keys and values of other patches add to an attention."""


def of_a_block(kind: str) -> int:
    """Return the number of operations that a block of this class starts."""
    return OF_A_BLOCK.get(kind, MIDDLING)


def passes_of_a_block(kind: str) -> int:
    """Return the number of passes over a token's features that a block of this class makes besides matmuls and attention."""
    return PASSES_OF_A_BLOCK.get(kind, MIDDLING_PASSES)
