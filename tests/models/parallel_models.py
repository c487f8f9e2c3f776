"""Plans for tests of a parallel forward, and the largest error allowed against the model's own forward."""

from __future__ import annotations

from torch import Tensor

from parallel_backend.distance import error_of
from tests.support.comfy_oracle import comfy_on_path

comfy_on_path()


TOLERANCE = 1e-5
PLANS = {
    "ulysses 2": {"ulysses": 2},
    "ring 3": {"ring": 3},
    "ring 2, ulysses 2": {"ring": 2, "ulysses": 2},
    "3 patches over 2 stages, ulysses 2": {"pipefusion": 2, "patches": 3, "ulysses": 2},
    "2 patches over 3 stages": {"pipefusion": 3, "patches": 2},
    "ring 2, ulysses 2, unequal": {"ring": 2, "ulysses": 2, "shares": (100, 61, 45, 20)},
}


def worst(results: list[list[Tensor]], expected: Tensor) -> float:
    """Return the largest relative error of all ranks' outputs. At least one rank must have an output."""
    assert any(results)
    return max(error_of(out, expected) for outs in results for out in outs)
