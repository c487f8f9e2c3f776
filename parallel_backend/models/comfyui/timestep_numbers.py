"""A cache on the device of the numbers by which ComfyUI's Wan embeds the timestep.

In every forward, `sinusoidal_embedding_1d` copies `torch.arange(half)` from pageable memory. For this copy, the host waits
until the device is idle.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

NAME = "sinusoidal_embedding_1d"


class TimestepNumbers(TorchFunctionMode):
    """A function mode in which `torch.arange(count)` returns a cached fp32 tensor on the device of the timestep.

    Args:
        model: a model of ComfyUI. Most models do not embed the timestep this way.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        modules = {each.__module__: sys.modules[each.__module__] for each in type(model).__mro__}
        self._modules = [module for module in modules.values() if hasattr(module, NAME)]
        self._device = torch.device("cpu")
        self._cache: dict[tuple[torch.device, int], Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return torch's result, or the cached tensor for `torch.arange(count)`."""
        if func is not torch.arange or len(args) != 1 or kwargs:
            return func(*args, **(kwargs or {}))
        key = self._device, args[0]
        if key not in self._cache:
            self._cache[key] = torch.arange(*args, device=self._device, dtype=torch.float32)
        return self._cache[key]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Make the embedding function use the cache while this context is active. The formula stays ComfyUI's."""
        owns = [(module, getattr(module, NAME)) for module in self._modules]
        for module, own in owns:
            setattr(module, NAME, functools.partial(self._embedded, own))
        try:
            yield
        finally:
            for module, own in owns:
                setattr(module, NAME, own)

    def _embedded(self, own: Callable[[int, Tensor], Tensor], dim: int, position: Tensor) -> Tensor:
        self._device = position.device
        with self:
            return own(dim, position)
