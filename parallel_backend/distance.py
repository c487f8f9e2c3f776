"""The error of a result, compared with the expected result."""

from __future__ import annotations

import math

from torch import Tensor


def error_of(actual: Tensor, expected: Tensor) -> float:
    """Return the relative L2 error; infinite for different shapes and for NaN, with which every comparison is False."""
    if actual.shape != expected.shape:
        return math.inf
    error = ((actual - expected).norm() / expected.norm()).item()
    return error if math.isfinite(error) else math.inf
