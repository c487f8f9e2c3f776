"""The certainty of predictions: the errors of predictions for published measurements that no constant was fitted on."""

from __future__ import annotations

ERRORS = {"bf16": 0.29, "quantised": 0.33}
"""The error of 80 % of the predictions for ComfyUI's runs, by the kind of weights.

With an error of 0.29 the published seconds are between 1 / 1.29 and 1.29 times the predicted seconds. `spread` in
`benchmarks/compared.py` computes it. Half of the predicted speed-ups are within 5 %.
"""


def kind_of(dtype: str) -> str:
    """Return the key of ERRORS for weights of a dtype."""
    return "bf16" if dtype == "bf16" else "quantised"


def likely(seconds: float, dtype: str) -> tuple[float, float]:
    """Return the least and the greatest seconds that a run probably takes, by its predicted seconds."""
    error = 1 + ERRORS[kind_of(dtype)]
    return seconds / error, seconds * error
