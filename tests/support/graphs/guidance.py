"""Settings of guidance nodes."""

from __future__ import annotations

NAG = {"nag_scale": 5.0, "nag_alpha": 0.5, "nag_tau": 1.5}
SKIPPING = {"double_layers": "1", "single_layers": "", "scale": 3.0, "start_percent": 0.0, "end_percent": 1.0,
            "rescaling_scale": 0.2}  # fmt: skip
