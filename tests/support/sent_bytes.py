"""Formulas for the bytes that a rank sends, which the cost model and the meter must agree with."""

from __future__ import annotations


def ulysses_bytes(
    tokens: float, hidden: int, blocks: int, element: int, ring: int, ulysses: int, group: float = 1
) -> float:
    """Return the bytes that a rank sends in one forward for Ulysses, with even cuts of whole head groups.

    Args:
        tokens: batch x (text + image).
        group: number of query heads that share one head of keys and values.
    """
    return (2 + 2 / group) * (ulysses - 1) / ulysses * tokens * hidden / (ring * ulysses) * blocks * element


def ring_bytes(
    tokens: float, hidden: int, blocks: int, element: int, ring: int, ulysses: int, group: float = 1
) -> float:
    """Return the bytes that a rank sends in one forward for Ring. The arguments are those of `ulysses_bytes`."""
    return 2 / group * (ring - 1) * tokens * hidden / (ring * ulysses) * blocks * element
