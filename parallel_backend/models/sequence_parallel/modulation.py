"""Modulation: what a block makes of the time and of pooled text alone, which are the same for all tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import silu
from torch.utils._pytree import tree_map_only


class Vector:
    """The tensor that blocks modulate by, in its place; SiLU of it, with which modulation begins, is made once for all.

    Everything else that is asked of it, torch's functions too, goes to the tensor.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.ndim = tensor.ndim
        self._activated: Tensor | None = None
        self._parts: dict[str, Vector] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)

    def __getitem__(self, index: Any) -> Vector:
        """A part of it, which is shared as well."""
        key = repr(index)  # slices cannot be hashed
        if key not in self._parts:
            self._parts[key] = Vector(self.tensor[index])
        return self._parts[key]

    def activated(self) -> Tensor:
        """SiLU of the vector, computed once."""
        if self._activated is None:
            self._activated = silu(self.tensor)
        return self._activated

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What torch calls in place of a function of its own."""
        kwargs = kwargs or {}
        if func is silu and not kwargs.get("inplace"):
            return args[0].activated()
        args, kwargs = tree_map_only(cls, lambda vector: vector.tensor, (args, kwargs))
        return func(*args, **kwargs)


def of_vectors(module: nn.Module) -> Callable[[Vector], Any]:
    """A modulation's forward for a vector. Where no activation comes first, it gets the tensor itself."""
    if isinstance(module, nn.Sequential) and not isinstance(module[0], nn.SiLU):
        return lambda vector: module.forward(vector.tensor)
    return lambda vector: module.forward(vector)
