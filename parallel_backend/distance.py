"""How far a result is from what it should be."""

from __future__ import annotations

import math

from torch import Tensor


def error_of(actual: Tensor, expected: Tensor) -> float:
    """Relative L2; infinite for another shape and for what is no number, with which no comparison holds."""
    if actual.shape != expected.shape:
        return math.inf
    error = ((actual - expected).norm() / expected.norm()).item()
    return error if math.isfinite(error) else math.inf
