"""Conditioning travels flat and comes back with its structure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from parallel_backend.conditioning import MAX_DEPTH, arguments, flatten
from parallel_backend.diffusion import Value
from parallel_backend.errors import Refused

NAMES = st.text("abc_", min_size=1, max_size=3)
PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text())
TREES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.sets(PLAIN, max_size=3),
        st.frozensets(PLAIN, max_size=3),
        st.dictionaries(NAMES, inner, min_size=1, max_size=3),
    ),
    max_leaves=8,
)


def sent(trees: dict[str, Any]) -> dict[str, Any]:
    """Return trees as a worker rebuilds them."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Value] = {}
    for name, tree in trees.items():
        flatten(name, tree, tensors, values)
    return arguments(tensors, values)


@given(st.dictionaries(NAMES, TREES, max_size=3))
def test_trees_come_back_with_the_type_of_each_collection(trees: dict[str, Any]) -> None:
    assert typed(sent(trees)) == typed(trees)


def typed(tree: Any) -> Any:
    """Return a tree with the type of each of its parts: 1, 1.0 and True are equal, and so are a set and a frozenset."""
    if isinstance(tree, dict):
        return {name: typed(child) for name, child in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree), [typed(child) for child in tree]
    return (type(tree), {typed(child) for child in tree}) if isinstance(tree, (set, frozenset)) else (type(tree), tree)


def test_tensors_come_back_in_their_places() -> None:
    first, second = torch.zeros(1), torch.ones(2)
    (came,) = sent({"ref": {"latents": [first, (second, "index")]}}).values()
    assert came["latents"][0] is first and came["latents"][1][0] is second
    assert type(came["latents"][1]) is tuple


@pytest.mark.parametrize("tree", [object(), {}, {"a.b": 1}, {1: 2}])
def test_what_cannot_be_sent_is_refused(tree: Any) -> None:
    with pytest.raises(Refused, match="cannot be sent to the workers"):
        sent({"ref": [tree]})


def test_a_tree_that_is_too_deep_is_refused() -> None:
    tree: Any = 0
    for _ in range(MAX_DEPTH + 1):
        tree = [tree]
    with pytest.raises(Refused, match="nested too deeply"):
        sent({"ref": tree})
