"""Operations that run on all of a tensor whose parts are on several ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from parallel_backend.distributed_tensor import DispatchRules, DistributedTensor


class OnOneRank(DistributedTensor):
    """A distributed tensor whose part is the whole; every operation requests the whole."""

    @classmethod
    def rules(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DispatchRules:
        return DispatchRules({}, lambda *_, **__: NotImplemented)

    def whole(self) -> Tensor:
        return self.local


def test_a_slice_of_a_batch_can_be_reshaped() -> None:
    """Z-Image's pixel decoder reshapes its picture's tokens so. torch treats the part as contiguous, and so calls view."""
    tokens = torch.arange(24.0).view(2, 4, 3)[:, 1:]
    part = OnOneRank.of_part(tokens, 1, (3,), torch.device("cpu"))
    assert torch.equal(part.reshape(6, 3), tokens.reshape(6, 3))
