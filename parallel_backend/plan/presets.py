"""What the presets of Parallel Plan make of its fields."""

from __future__ import annotations

import msgspec

from .plan import ParallelPlan

AUTOMATIC, SMALLEST, SLOW_LINKS = "automatic", "smallest memory", "slow links (approximate)"
PRESETS = (AUTOMATIC, SMALLEST, SLOW_LINKS)


def with_preset(preset: str, fields: ParallelPlan) -> ParallelPlan:
    """The plan for a preset and the fields beside it, where 0 means "choose for me" and any other value counts.

    `automatic` chooses exact plans only, `smallest memory` besides streams the weights from host memory, `slow links` also
    chooses PipeFusion, which changes the picture.
    """
    staged = fields.pipefusion > 1
    off = 0 if preset == SLOW_LINKS else 1
    return msgspec.structs.replace(
        fields,
        pipefusion=fields.pipefusion if staged else off,
        warmup_steps=fields.warmup_steps or ParallelPlan().warmup_steps,
        weights="streamed" if preset == SMALLEST and fields.weights == "replicated" else fields.weights,
    )
