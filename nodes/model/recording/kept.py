"""What a sampler function may change beside the latent: seen, and put back."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch

_MISSING = object()


class Kept:
    """The contents of things as they are now, of their lists and dicts, and of what functions remember.

    Tensors and other objects are told apart by identity alone, but for those that hold a prompt's conditioning.
    """

    def __init__(self, things: Iterable[Any]) -> None:
        self._seen: set[int] = set()
        self._containers: list[tuple[dict[Any, Any] | list[Any], dict[Any, Any] | list[Any]]] = []
        self._cells: list[tuple[CellType, Any]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        for thing in things:
            self._keep(thing)

    @property
    def changed(self) -> bool:
        """Whether anything is other than it was."""
        return (
            any(not _same(now, then) for now, then in self._containers)
            or any(_contents(cell) is not then for cell, then in self._cells)
            or any(names.get(name, _MISSING) is not then for names, name, then in self._globals)
        )

    def put_back(self) -> None:
        """Give every container that has changed the contents that it had."""
        for now, then in self._containers:
            if _same(now, then):
                continue
            now.clear()
            if isinstance(now, dict):
                now.update(then)
            else:
                now.extend(then)
        for cell, content in self._cells:
            if _contents(cell) is content:
                continue
            if content is _MISSING:
                del cell.cell_contents
            else:
                cell.cell_contents = content
        for names, name, value in self._globals:
            names[name] = value

    def _keep(self, thing: Any) -> None:
        if id(thing) in self._seen:
            return
        self._seen.add(id(thing))
        if isinstance(thing, dict):
            self._containers.append((thing, dict(thing)))
            self._keep_all(thing.values())
        elif isinstance(thing, list):
            self._containers.append((thing, list(thing)))
            self._keep_all(thing)
        elif isinstance(thing, tuple):
            self._keep_all(thing)
        elif isinstance(thing, FunctionType):
            self._keep_function(thing)
        elif isinstance(thing, MethodType):
            self._keep(thing.__func__)
            self._keep(vars(thing.__self__) if hasattr(thing.__self__, "__dict__") else None)
        elif type(thing).__module__ == "comfy.conds":
            self._keep(vars(thing))

    def _keep_all(self, things: Iterable[Any]) -> None:
        for each in list(things):
            self._keep(each)

    def _keep_function(self, function: Any) -> None:
        for cell in function.__closure__ or ():
            self._cells.append((cell, _contents(cell)))
            self._keep(_contents(cell))
        self._keep(getattr(function, "__wrapped__", None))
        self._keep(function.__defaults__ or ())
        self._keep(function.__dict__)
        for name in {*names_in(function.__code__)} & function.__globals__.keys():
            value = function.__globals__[name]
            if isinstance(value, bool | int | float | str | None | list | dict):
                self._globals.append((function.__globals__, name, value))
                self._keep(value)


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def _same(now: Any, then: Any) -> bool:
    if len(now) != len(then):
        return False
    if isinstance(now, dict):
        return all(now.get(key, _MISSING) is value for key, value in then.items())
    return all(one is other for one, other in zip(now, then, strict=True))


def names_in(code: CodeType) -> Iterator[str]:
    """All that a function's code, and what is defined inside of it, calls by name."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


ANOTHER_SEED = 0x9E3779B9


class Generators:
    """The states of torch's, numpy's and Python's own generators, on all devices that are in use, as they are now."""

    def __init__(self) -> None:
        self._devices = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._then = self._left = self._states()

    @property
    def moved(self) -> bool:
        """Whether numbers had been drawn, or a seed given, when they were put back."""
        return any(self._moved())

    def put_back(self) -> None:
        """Set all generators as if nothing had been drawn."""
        self._left = self._states()
        self._set(self._then)

    @contextlib.contextmanager
    def another_state(self) -> Iterator[Generators]:
        """While this is entered all are in another state."""
        torch.default_generator.manual_seed(ANOTHER_SEED)
        if self._devices:
            torch.cuda.manual_seed_all(ANOTHER_SEED)
        np.random.seed(ANOTHER_SEED)
        random.seed(ANOTHER_SEED)
        try:
            yield Generators()
        finally:
            self._set(self._then)

    def seeded_like(self, other: Generators) -> bool:
        """Whether those that were moved were left where the same code left them from elsewhere: it had given them a seed."""
        pairs = zip(self._moved(), self._left, other._left, strict=True)
        return all(_equal(one, another) for moved, one, another in pairs if moved)

    def _moved(self) -> list[bool]:
        return [not _equal(*pair) for pair in zip(self._left, self._then, strict=True)]

    def _set(self, states: tuple[Any, Any, Any, Any]) -> None:
        here, legacy, python, devices = states
        torch.set_rng_state(here)
        np.random.set_state(legacy)
        random.setstate(python)
        if self._devices:
            torch.cuda.set_rng_state_all(devices)

    def _states(self) -> tuple[Any, Any, Any, Any]:
        devices = torch.cuda.get_rng_state_all() if self._devices else []
        return torch.get_rng_state(), np.random.get_state(), random.getstate(), devices


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(_equal(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other)
