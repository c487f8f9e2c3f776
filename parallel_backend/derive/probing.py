"""Probes one block: finds which input positions change the operands of its attentions and its return values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .calls import noise_like
from .rules import Undescribed
from .tokens import codes, decoded, differs
from .tracing import Attention, ModuleCall
from .values import tensors_in

Change = Callable[[str, int, Tensor], Tensor]


@dataclass(frozen=True)
class Followed:
    """The input index that each position of each attention's q, k and v, and of each returned tensor, follows; see `tokens`."""

    q: tuple[Tensor, ...]
    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    returned: tuple[Tensor, ...]


class Probe:
    """A block's call that can be repeated with other tensors.

    Attributes:
        run: the block's call.
        attentions: the attention calls of the block.

    Raises:
        Undescribed: the block gives another result each time, or a result that is not finite.
    """

    def __init__(self, run: ModuleCall) -> None:
        self.run = run
        returned, self.attentions = run.again(lambda name, number, tensor: tensor)
        self._base = _observed(returned, self.attentions)
        again = self._changed(lambda name, number, tensor: tensor)
        if any(bool(each.any()) for each in again):
            raise Undescribed(f"{run.path} returns another result in each call, as if it drew random numbers")
        if not all(bool(torch.isfinite(each).all()) for each in self._base):
            raise Undescribed(f"{run.path} returns NaN or infinite values with random weights")

    def tensors(self, name: str) -> list[Tensor]:
        """Return the tensors in an argument."""
        return tensors_in(self.run.values[name])

    def follow(self, name: str, number: int, dims: Sequence[int]) -> Followed:
        """Return the index that each position follows, along neighbouring dimensions (flattened) of an argument's tensor."""
        sizes = [self.tensors(name)[number].shape[dim] for dim in dims]

        def disturbed(indices: Tensor) -> Change:
            def change(argument: str, index: int, tensor: Tensor) -> Tensor:
                if argument != name or index != number:
                    return tensor
                chosen = indices.view(sizes)
                mask = chosen.view(*[1] * dims[0], *sizes, *[1] * (tensor.ndim - dims[-1] - 1))
                return torch.where(mask, tensor + noise_like(tensor), tensor)

            return change

        changed = [self._changed(disturbed(indices)) for indices in codes(math.prod(sizes))]
        return self._apart([decoded(each) for each in zip(*changed, strict=True)])

    def reached(self, name: str, number: int) -> Followed:
        """Return 0 for each position that an argument's tensor changes, and -1 for each other position."""

        def change(argument: str, index: int, tensor: Tensor) -> Tensor:
            return tensor + noise_like(tensor) if argument == name and index == number else tensor

        return self._apart([each.long() - 1 for each in self._changed(change)])

    def mixed_into(self, name: str, number: int, row: int) -> Tensor:
        """Return a bool per token of the first returned tensor: True if a row of an argument's tensor changes the token.

        Rows lie along dimension 1. A row may reach the token through attention whose number of keys differs from the number of
        tokens.
        """

        def change(argument: str, index: int, tensor: Tensor) -> Tensor:
            if argument == name and index == number:
                tensor[:, row] += noise_like(tensor[:, row])
            return tensor

        returned, _ = self.run.again(change, mixing=True)
        return _changed_tokens(differs(self._mixed, tensors_in(returned)[0]))

    @cached_property
    def _mixed(self) -> Tensor:
        """Return the first returned tensor of a call with `mixing`; see `ModuleCall.again`."""
        returned, _ = self.run.again(lambda argument, index, tensor: tensor, mixing=True)
        return tensors_in(returned)[0]

    def _changed(self, change: Change) -> list[Tensor]:
        """Return a bool per position of each observed tensor: True if the change reaches the position."""
        returned, attentions = self.run.again(change)
        observed = _observed(returned, attentions)
        same_shapes = len(observed) == len(self._base) and all(
            a.shape == b.shape for a, b in zip(observed, self._base, strict=True)
        )
        if not same_shapes:
            raise Undescribed(f"the operations of {self.run.path} depend on the values of its arguments")
        return [_changed_tokens(differs(a, b)) for a, b in zip(self._base, observed, strict=True)]

    def _apart(self, positions: Sequence[Tensor]) -> Followed:
        count = 3 * len(self.attentions)
        operands = positions[:count]
        return Followed(tuple(operands[::3]), tuple(operands[1::3]), tuple(operands[2::3]), tuple(positions[count:]))


def _observed(returned: Any, attentions: Sequence[Attention]) -> list[Tensor]:
    operands = [each.movedim(1, 2) for a in attentions for each in (a.operands.q, a.operands.k, a.operands.v)]
    return [*(each.flatten(2) for each in operands), *tensors_in(returned)]


def _changed_tokens(changed: Tensor) -> Tensor:
    """Return a bool per token. Tokens lie along all dimensions but the batch (first) and the last.

    Of a matrix, they lie along the first.
    """
    if changed.ndim < 3:
        return changed.flatten(1).any(dim=1) if changed.ndim == 2 else changed
    return changed.any(dim=0).any(dim=-1).flatten()
