"""What runs on the whole of a tensor that ranks hold in parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from parallel_backend.distributed_tensor import DispatchRules, DistributedTensor


class OnOneRank(DistributedTensor):
    """Its part is the whole, of which every operation asks."""

    @classmethod
    def rules(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DispatchRules:
        return DispatchRules({}, lambda *_, **__: NotImplemented)

    def whole(self) -> Tensor:
        return self.local


def test_a_slice_of_a_batch_is_reshaped() -> None:
    """As the pixel decoder of Z-Image's does with its picture's tokens: torch takes a part for contiguous, and so views it."""
    tokens = torch.arange(24.0).view(2, 4, 3)[:, 1:]
    part = OnOneRank.of_part(tokens, 1, (3,), torch.device("cpu"))
    assert torch.equal(part.reshape(6, 3), tokens.reshape(6, 3))
