"""How long a forward takes that is not spread: of one item of a batch, and of two."""

from __future__ import annotations

from typing import Any

from ...comm.device_events import DeviceEvents
from ...models.comfyui.rows import rows_a_unit
from ...models.comfyui.whole_family import WholeFamily
from ...models.comfyui.whole_model import WholeModel
from ...weights.layers.quantised import compute_in
from .example import ForwardExample
from .random_weights import randomly_weighted

RUNS = 3


def time_forward(family: WholeFamily, config: Any, example: ForwardExample) -> tuple[list[float], tuple[int, ...]]:
    """Seconds, the shortest of some runs, of a forward of so many rows of a batch, and of twice as many; and these numbers.

    The weights are all of the same few numbers, so that a model is timed that has no room beside the one in use.
    """
    model = randomly_weighted(family, config, example.dtype, example.device)
    compute_in(model.module, example.x.dtype)
    few = rows_a_unit(example.values)
    counts = few, 2 * few
    return [_time(model, example.rows(count)) for count in counts], counts


def _time(model: WholeModel, example: ForwardExample) -> float:
    inputs, events, best = example.inputs("time"), DeviceEvents(example.device), float("inf")
    for _ in range(RUNS):
        events.record()
        model.compute(example.x, inputs)
        events.record()
        best = min(best, events.pop_seconds()[1])
        example.on_progress()
    return best
