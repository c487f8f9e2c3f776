"""Which of torch's operations give each value of their result by the values in its place alone."""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten

COPIES = (
    aten._to_copy.default,
    aten.clone.default,
    aten.detach.default,
    aten.alias.default,
    aten.copy_.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
)
"""Operations of this kind that torch does not tag as such."""


def is_element_wise(operation: Any) -> bool:
    """Whether an `OpOverload` is one; what draws random numbers is none, as ranks would draw other ones."""
    tags = operation.tags
    return operation in COPIES or (torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags)
