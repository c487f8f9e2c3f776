"""Modulation: the tensors that a block computes from the timestep and pooled text, which are the same for all tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import silu
from torch.utils._pytree import tree_map_only


class Vector:
    """A wrapper of the tensor from which blocks compute their modulation.

    Modulation begins with SiLU of the tensor, which the wrapper computes once for all blocks. Everything else, torch's
    functions too, applies to the tensor itself.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.ndim = tensor.ndim
        self._activated: Tensor | None = None
        self._parts: dict[str, Vector] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)

    def __getitem__(self, index: Any) -> Vector:
        """Return a wrapper of a part of the tensor. Its SiLU is computed once as well."""
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
        """Compute a torch function of wrapped tensors. torch calls this method instead of the function."""
        kwargs = kwargs or {}
        if func is silu and not kwargs.get("inplace"):
            return args[0].activated()
        args, kwargs = tree_map_only(cls, lambda vector: vector.tensor, (args, kwargs))
        return func(*args, **kwargs)


def of_vectors(module: nn.Module) -> Callable[[Vector], Any]:
    """Return the forward of a modulation module for a vector. An `nn.Sequential` without SiLU in front gets the plain tensor."""
    if isinstance(module, nn.Sequential) and not isinstance(module[0], nn.SiLU):
        return lambda vector: module.forward(vector.tensor)
    return lambda vector: module.forward(vector)
