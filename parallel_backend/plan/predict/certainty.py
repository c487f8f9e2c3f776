"""The certainty of predictions: the errors of predictions for published measurements that no constant was fitted on."""

from __future__ import annotations

ERRORS = {"bf16": 0.17, "quantised": 0.25}
"""The relative error that 80 % of the predicted seconds of ComfyUI's runs stay within, by the kind of weights.

`spread` in `benchmarks/compared.py` computes it. Half of the predicted speed-ups are within 5 %.
"""


def kind_of(dtype: str) -> str:
    """Return the key of ERRORS for weights of a dtype."""
    return "bf16" if dtype == "bf16" else "quantised"


def likely(seconds: float, dtype: str) -> tuple[float, float]:
    """Return the least and the greatest seconds that a prediction probably stands for."""
    error = 1 + ERRORS[kind_of(dtype)]
    return seconds / error, seconds * error
