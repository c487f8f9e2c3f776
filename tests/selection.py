"""What the quick run takes of the tests.

The quick run leaves out what is marked `thorough`, and says how much that is; `--all` takes it too. What proves what in
which run is in tests/README.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping

import pytest

thorough = pytest.mark.thorough


def product(**values: Collection[object]) -> pytest.MarkDecorator:
    """Parametrises a test with all combinations of its parameters' values, which may have names (a mapping).

    For values that do not hang on one another: the quick run takes the diagonal, in which each value has its turn (the
    first ones together, then the second ones, and so on; shorter lists begin again).
    """
    named = [
        list(each.items()) if isinstance(each, Mapping) else [(str(value), value) for value in each]
        for each in values.values()
    ]
    lengths = [len(each) for each in named]
    diagonal = {tuple(turn % length for length in lengths) for turn in range(max(lengths))}
    cases = []
    for place in itertools.product(*map(range, lengths)):
        names, combination = zip(*(each[index] for each, index in zip(named, place, strict=True)), strict=True)
        cases.append(pytest.param(*combination, id="-".join(names), marks=() if place in diagonal else thorough))
    return pytest.mark.parametrize(tuple(values), cases)
