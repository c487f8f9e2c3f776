"""The models that one can ask about by name, from `known_models.json`, and the usual job of each.

The sizes are those of ComfyUI's own model classes at their published configurations: `tests/plan/test_known_models.py`
builds each class and counts it again. CogVideoX and PixArt, which run over diffusers' modules, are as in their public
configurations.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ...errors import Refused
from .profiles import Device, ForwardTime, ModelShape

MODELS = Path(__file__).with_name("known_models.json")


@dataclass(frozen=True)
class UnshardedWork:
    """One forward of an unsharded model, for a batch of one.

    `flops` of matmuls and convolutions, `scores` of attention, and the bytes that all else reads and writes, for each position
    of the latent; `working` bytes that it computes with, likewise; `operations` that it starts.
    """

    flops: float
    scores: float
    traffic: float
    working: float
    operations: int

    def on(self, device: Device, positions: int) -> ForwardTime:
        """Return seconds on a device, as a start and the time per further batch item. The host may be slower than the
        device.
        """
        item = positions * (
            self.flops / device.matmul + self.scores / device.attention + self.traffic / device.bandwidth
        )
        host = self.operations * device.launch
        single, double = max(host, item), max(host, 2 * item)
        return ForwardTime(2 * single - double, double - single)


@dataclass(frozen=True)
class KnownModel:
    """A model, and the usual job: width, height and frames, and steps. `note` is what else a buyer should know.

    `work` is that of a forward of an unsharded model; None for all others.
    """

    shape: ModelShape
    size: tuple[int, int, int] = (1024, 1024, 1)
    steps: int = 20
    note: str = ""
    work: UnshardedWork | None = None


@functools.cache
def _models() -> dict[str, KnownModel]:
    models = msgspec.json.decode(MODELS.read_bytes(), type=list[KnownModel])
    return {model.shape.name: model for model in models}


def known_model(name: str) -> KnownModel:
    """A model by name. Raises Refused for an unknown one."""
    known = _models()
    if name not in known:
        raise Refused(f"the model {name!r} is unknown: use {', '.join(known)}.")
    return known[name]


def model_names() -> list[str]:
    """Names that `known_model` knows."""
    return list(_models())
