"""The weights a rank holds: loaded when first asked for, kept while they are the ones asked for."""

from __future__ import annotations

import gc

import torch

from ..models import FAMILIES
from ..models.family import Model, ModelSpec
from ..weights.checkpoint import DTYPES, read_header
from ..weights.layers import materialise
from ..weights.loader import load_weights
from .status import Status

STORAGE_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values() if dtype.is_floating_point}


class Holder:
    """At most one model on one device."""

    def __init__(self, device: torch.device, status: Status) -> None:
        self._device = device
        self._status = status
        self._spec: ModelSpec | None = None
        self._model: Model | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes of weights on the device."""
        parameters = self._model.module.parameters() if self._model else ()
        return sum(parameter.nbytes for parameter in parameters)

    def hold(self, spec: ModelSpec) -> Model:
        """The model of a spec, loaded in place of another one if need be."""
        if self._model is None or self._spec != spec:
            self.release()
            self._model = self._load(spec)
            self._spec = spec
        return self._model

    def release(self) -> None:
        """Give the weights' memory back."""
        self._model = self._spec = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _load(self, spec: ModelSpec) -> Model:
        self._status.enter("loading the model")
        family = FAMILIES[spec.family]
        part, config = family.inspect(read_header(spec.path))
        model = family.build(config)
        materialise(model.module, STORAGE_DTYPES[spec.dtype], self._device)
        load_weights(model.module, part, family.keys(config), lambda _: self._status.mark())
        return model
