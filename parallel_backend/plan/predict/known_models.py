"""The models that the plan command knows by name, from `known_models.json`, and the usual job of each.

The sizes are those of ComfyUI's own model classes at their published configurations: `tests/plan/test_known_models.py`
builds each class and counts its parameters again. CogVideoX and PixArt run on diffusers' modules and have the sizes of their
public configurations.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import msgspec

from .lookup import looked_up
from .profiles import Device, ForwardTime, ModelShape

MODELS = Path(__file__).with_name("known_models.json")


@dataclass(frozen=True)
class UnshardedWork:
    """The work of one forward of an unsharded model, for a batch of one.

    Attributes:
        flops: floating-point operations of matmuls and convolutions, per position of the latent.
        scores: floating-point operations of attention, per position of the latent.
        traffic: bytes that all other operations read and write, per position of the latent.
        working: bytes of activations, per position of the latent.
        operations: the number of operations that the host starts.
    """

    flops: float
    scores: float
    traffic: float
    working: float
    operations: int

    def on(self, device: Device, positions: int) -> ForwardTime:
        """Return the seconds on a device for a latent of `positions` positions.

        A forward takes as long as the slower of the device and the host, which starts the operations.
        """
        item = positions * (
            self.flops / device.matmul_rate("") + self.scores / device.attention_rate + self.traffic / device.bandwidth
        )
        host = self.operations * device.launch
        single, double = max(host, item), max(host, 2 * item)
        return ForwardTime(2 * single - double, double - single)


@dataclass(frozen=True)
class KnownModel:
    """A model and its usual job.

    Attributes:
        shape: the model's shape.
        size: width and height in pixels, and frames.
        steps: the number of steps.
        note: further information for a buyer of a machine.
        work: the work of a forward of an unsharded model; None for all other models.
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
    """Return a model by name. Raise Refused as `looked_up` does."""
    return looked_up("model", name, _models())


def model_names() -> list[str]:
    """Return the names that `known_model` knows."""
    return list(_models())
