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


def test_state_of_a_forward_is_restored() -> None:
    model = nn.Sequential(Keeps(), Keeps())
    left = StateLeak(model)
    for _ in range(2):
        left.restore()
        before = left.state()
        model(torch.ones(2))
        left.find(before)
    left.restore()
    for part in model:
        assert isinstance(part, Keeps)
        assert (part.entries, part.found, part.last, part.size) == ([], {"first": 1}, None, 3)
        assert not hasattr(part, "added")
        assert torch.equal(part.weight, torch.ones(2))


def test_changes_between_requests_stay() -> None:
    """Weights are cast between requests, for example, for a run in another dtype."""
    part = Keeps()
    left = StateLeak(part)
    before = left.state()
    part(torch.ones(2))
    left.find(before)
    part.size = 5
    left.restore()
    assert part.size == 5
