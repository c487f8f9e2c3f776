"""How far a result is from what it should be."""

from __future__ import annotations

import math

from torch import Tensor


def error_of(found: Tensor, expected: Tensor) -> float:
    """Relative L2; infinite for another shape and for what is no number, with which no comparison holds."""
    if found.shape != expected.shape:
        return math.inf
    error = ((found - expected).norm() / expected.norm()).item()
    return error if math.isfinite(error) else math.inf
