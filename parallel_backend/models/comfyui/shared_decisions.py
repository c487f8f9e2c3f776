"""Numbers that decide what ranks compute next: every rank takes those of the first rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...comm.communicator import Communicator

DECIDING = frozenset(
    {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.argmax.default, torch.ops.aten.multinomial.default}
)
"""Operations that read a number for Python, or choose or draw a token."""

NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
"""The dtype in which a number of Python is sent."""


class SharedDecisions(TorchDispatchMode):
    """A context in which every rank gets the first rank's results of the operations in DECIDING.

    Ranks that run the same code on different kinds of GPU differ in the last bits. Without this, one rank could draw another
    token, or end a loop earlier, and the others would wait for it forever.

    Args:
        axis: all ranks, on their devices.
        host: all ranks, on CPU tensors.
    """

    def __init__(self, axis: Communicator, host: Communicator) -> None:
        super().__init__()
        self._axis = axis
        self._host = host
        self._active = False

    def __enter__(self) -> Self:
        self._active = True
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._active = False

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Leave the context for a while, for work of one rank."""
        if not self._active:
            yield
            return
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return the operation's result, or the first rank's result. Then a collective of all ranks."""
        result = func(*args, **(kwargs or {}))
        if func not in DECIDING or self._axis.size == 1:
            return result
        if isinstance(result, Tensor):
            axis = self._host if result.device.type == "cpu" else self._axis
            return _of_first(axis, result).view(result.shape)
        return _of_first(self._host, torch.tensor([result], dtype=NUMBERS[type(result)])).item()


def _of_first(axis: Communicator, tensor: Tensor) -> Tensor:
    """Return the first rank's tensor, flat, on every rank. A collective."""
    return broadcast(axis, tensor if axis.rank == 0 else None, 0, tensor.numel(), tensor.dtype)


def broadcast(axis: Communicator, tensor: Tensor | None, owner: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return the owner's tensor, flat, on every rank. A collective.

    Args:
        tensor: the tensor on the owner; None on the other ranks.
        count: the number of its elements.
    """
    receive = [count if rank == owner else 0 for rank in range(axis.size)]
    if tensor is None:
        return axis.all_to_all(torch.empty(0, dtype=dtype, device=axis.device), [0] * axis.size, receive)
    flat = tensor.reshape(-1)
    return axis.all_to_all(flat.repeat(axis.size), [count] * axis.size, receive)
