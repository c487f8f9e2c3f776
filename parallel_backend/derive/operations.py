"""How many operations a block starts on a device, counted while it runs on the CPU: what predictions go by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from .looking import Run
from .values import tensors_in

NOTHING = ("detach", "empty", "_unsafe_view", "_reshape_alias", "lift_fresh")
"""Of what starts none, besides views, the names."""

COPIED = 3
"""Of each attention that is answered token by token its operands are copied."""


class _Counting(TorchDispatchMode):
    """Counts what starts something."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or func.overloadpacket.__name__.startswith(NOTHING))
        return func(*args, **(kwargs or {}))


def operations_of(run: Run) -> int:
    """Those of one call of a block, an attention counted as one."""
    given: Mapping[str, Any] = run.values
    with _Counting() as counting:
        _, attentions = run.again(lambda name, number, tensor: tensor)
    copied = sum(len(tensors_in(value)) for value in given.values())
    return counting.count - copied - COPIED * len(attentions)
