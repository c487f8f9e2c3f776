"""The selection of tests for the quick run.

The quick run leaves out the tests marked `thorough` and reports their number; `--all` runs them too. tests/README.md says which
run proves what.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping

import pytest
from _pytest.mark import ParameterSet

thorough = pytest.mark.thorough

Combination = tuple[int, ...]
"""A combination: for each parameter, the index of its value."""

Pair = tuple[tuple[int, int], ...]
"""Two parameters, each with the index of a value."""


def product(**values: Collection[object]) -> pytest.MarkDecorator:
    """Parametrise a test with all combinations of its parameters' values. A mapping gives the values names.

    Use it for values that are independent. The quick run takes only the diagonal, in which each value appears: the first values
    together, then the second ones, and so on. Shorter lists begin again.
    """
    return _parametrise(values, itertools.product(*(range(len(each)) for each in values.values())))


def pairwise(**values: Collection[object]) -> pytest.MarkDecorator:
    """Parametrise a test with combinations in which each two values of different parameters meet at least once.

    Use it for parameters of which no three depend on one another: it finds every fault that two of them make together.
    """
    return _parametrise(values, _meetings([len(each) for each in values.values()]))


def crossed(
    rows: Mapping[str, object], columns: Mapping[str, object], quick: Mapping[str, str]
) -> Iterator[ParameterSet]:
    """Yield each row with each column as the values of two parameters. The quick run takes the named column of the named rows."""
    for (row, value), (column, other) in itertools.product(rows.items(), columns.items()):
        yield pytest.param(value, other, id=f"{row}-{column}", marks=[thorough] * (quick.get(row) != column))


def _parametrise(values: Mapping[str, Collection[object]], places: Iterable[Combination]) -> pytest.MarkDecorator:
    named = [
        list(each.items()) if isinstance(each, Mapping) else [(str(value), value) for value in each]
        for each in values.values()
    ]
    diagonal = set(_diagonal([len(each) for each in named]))
    cases = []
    for place in places:
        names, combination = zip(*(each[index] for each, index in zip(named, place, strict=True)), strict=True)
        cases.append(pytest.param(*combination, id="-".join(names), marks=() if place in diagonal else thorough))
    return pytest.mark.parametrize(tuple(values), cases)


def _diagonal(lengths: list[int]) -> list[Combination]:
    return [tuple(turn % length for length in lengths) for turn in range(max(lengths))]


def _pairs(place: Mapping[int, int]) -> set[Pair]:
    """Return the pairs that meet in a combination, or in part of one."""
    return set(itertools.combinations(sorted(place.items()), 2))


def _meetings(lengths: list[int]) -> list[Combination]:
    """Return the diagonal, then a combination for each pair that has not met, with as many other unmet pairs as possible."""
    places = _diagonal(lengths)
    met = set[Pair]().union(*(_pairs(dict(enumerate(place))) for place in places))
    two = sorted(itertools.combinations(range(len(lengths)), 2), key=lambda pair: -lengths[pair[0]] * lengths[pair[1]])
    for parameters in two:
        for indices in itertools.product(*(range(lengths[parameter]) for parameter in parameters)):
            place = dict(zip(parameters, indices, strict=True))
            if _pairs(place) <= met:
                continue
            for parameter, length in enumerate(lengths):
                if parameter not in place:
                    turn = [(index + len(places)) % length for index in range(length)]  # ties go to each value in turn
                    place[parameter] = max(turn, key=lambda index: len(_pairs(place | {parameter: index}) - met))
            met |= _pairs(place)
            places.append(tuple(place[parameter] for parameter in range(len(lengths))))
    return places
