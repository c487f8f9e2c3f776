"""State that a forward leaves on its modules is restored when the next request begins."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from parallel_backend.snapshot import StateLeak


class Keeps(nn.Module):
    """A module that keeps state in each possible way."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.entries: list[Any] = []
        self.found: dict[str, Any] = {"first": 1}
        self.last: Tensor | None = None
        self.size = 3

    def forward(self, x: Tensor) -> Tensor:
        self.entries.append(x)
        self.found["x"] = x
        self.last = x
        self.added = x
        return x * self.weight


def test_state_of_a_forward_is_restored_and_changes_between_requests_stay() -> None:
    """Weights are cast between requests, for example, for a run in another dtype."""
    first, second = Keeps(), Keeps()
    model = nn.Sequential(first, second)
    left = StateLeak(model)
    for _ in range(2):
        left.restore()
        before = left.state()
        model(torch.ones(2))
        left.find(before)
    first.size = 5
    left.restore()
    for part, size in ((first, 5), (second, 3)):
        assert (part.entries, part.found, part.last, part.size) == ([], {"first": 1}, None, size)
        assert not hasattr(part, "added")
        assert torch.equal(part.weight, torch.ones(2))
