"""Outputs of models and ControlNets in a step's first pass, which the second pass reads instead of computing them again."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves

Reply = TypeVar("Reply")

PLAIN = (bool, int, float, str, uuid.UUID, type(None))
"""Types of leaves of a question that are compared by value. ComfyUI names prompts by UUIDs."""


class RecordedAnswers(Generic[Reply]):
    """Answers with their questions, which are trees of tensors and plain values. Each answer is given once.

    The second pass may make other calls than the first: ComfyUI decides by live state, such as free memory, which prompts share
    a model call. So an answer is found by its question and never by its place in the order.
    """

    def __init__(self) -> None:
        self._recorded: list[tuple[Any, Reply]] = []

    def __len__(self) -> int:
        """Return the number of recorded answers that were not taken."""
        return len(self._recorded)

    def add(self, question: Any, answer: Reply) -> None:
        """Record the answer to a question."""
        self._recorded.append((question, answer))

    def take(self, question: Any, compute: Callable[[], Reply]) -> Reply:
        """Return the recorded answer to an equal question, or else the result of `compute`."""
        for index, (recorded, answer) in enumerate(self._recorded):
            if _equal(recorded, question):
                del self._recorded[index]
                return answer
        return compute()


def compared_leaves(tree: Any) -> list[Any]:
    """Return the tensors and plain values of a tree, without the functions and objects in it."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, (Tensor, *PLAIN))]


def _equal(first: Any, second: Any) -> bool:
    (leaves, structure), (second_leaves, second_structure) = tree_flatten(first), tree_flatten(second)
    return structure == second_structure and all(map(_equal_leaves, leaves, second_leaves))


def _equal_leaves(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first is second or (
            first.dtype == second.dtype and first.device == second.device and torch.equal(first, second)
        )
    return first is second or (isinstance(first, PLAIN) and type(first) is type(second) and first == second)
