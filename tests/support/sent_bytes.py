"""Bytes that a rank sends, by formula: what the cost model and the meter must agree with."""

from __future__ import annotations


def ulysses_bytes(
    tokens: float, hidden: int, blocks: int, element: int, ring: int, ulysses: int, group: float = 1
) -> float:
    """Bytes a rank sends in one forward for Ulysses; `tokens` is batch x (text + image). Even cuts, of whole groups.

    Args:
        group: how many of the queries' heads share one of keys and values.
    """
    return (2 + 2 / group) * (ulysses - 1) / ulysses * tokens * hidden / (ring * ulysses) * blocks * element


def ring_bytes(
    tokens: float, hidden: int, blocks: int, element: int, ring: int, ulysses: int, group: float = 1
) -> float:
    """Bytes a rank sends in one forward for Ring; arguments as of `ulysses_bytes`."""
    return 2 / group * (ring - 1) * tokens * hidden / (ring * ulysses) * blocks * element
