"""What a sampler function may change beside the latent: seen, and put back."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from ..own_code import OWN_CODE, of_another_pack, own
from .tape import NotRecordable

_MISSING = object()

MOST = 50_000
"""The number of things in which a function may remember something; a large pack reaches some thousands."""

MOST_BYTES = 1 << 26
"""The number of bytes of all tensors and arrays that are compared by value; others are told apart by identity."""


class StateSnapshot:
    """The contents of things as they are now, of their lists and dicts, and of what functions remember.

    Tensors and other objects are told apart by identity alone, but for those that hold a prompt's conditioning.
    """

    def __init__(self, things: Iterable[Any]) -> None:
        self._seen: dict[int, Any] = {}  # with the things, whose numbers no others get meanwhile
        self._containers: list[tuple[dict[Any, Any] | list[Any] | deque[Any], dict[Any, Any] | list[Any]]] = []
        self._cells: list[tuple[CellType, Any]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        for thing in things:
            self._keep(thing)

    @property
    def changed(self) -> bool:
        """Return True if a container, closure cell or global differs from its recorded contents."""
        return (
            any(not _same(now, then) for now, then in self._containers)
            or any(_contents(cell) is not then for cell, then in self._cells)
            or any(names.get(name, _MISSING) is not then for names, name, then in self._globals)
        )

    def restore(self) -> None:
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
            if value is _MISSING:
                names.pop(name, None)
            else:
                names[name] = value

    def _keep(self, thing: Any) -> None:
        if id(thing) in self._seen:
            return
        self._seen[id(thing)] = thing
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
        self._keep_names(function)

    def _keep_names(self, function: FunctionType) -> None:
        for name in {*names_in(function.__code__)} & function.__globals__.keys():
            value = function.__globals__[name]
            if isinstance(value, bool | int | float | str | None | list | dict):
                self._globals.append((function.__globals__, name, value))
                self._keep(value)


class FunctionStateSnapshot(StateSnapshot):
    """All that functions of other packs remember, as it is now: what they reach by name, in closures, objects and classes.

    ComfyUI's own objects, and those of the libraries that it calls, are told apart by identity alone.

    Raises:
        NotRecordable: there are more than MOST objects, or one of them is an iterator. The position of an iterator (a generator
            object, `itertools.count`, an open file) cannot be restored.
    """

    def __init__(self, things: Iterable[Any]) -> None:
        self._states: list[tuple[Callable[[], Any], Callable[[Any], object], Any]] = []
        self._classes: list[tuple[type, dict[str, Any]]] = []
        self._sets: list[tuple[set[Any], set[Any]]] = []
        self._slots: list[tuple[Any, str, Any]] = []
        self._bytes = 0
        self._waiting: list[Any] = []
        super().__init__(things)
        while self._waiting:
            if len(self._seen) > MOST:
                raise NotRecordable(f"reaches more than {MOST} things in which it might remember something")
            self._keep_now(self._waiting.pop())

    @property
    def changed(self) -> bool:
        """Return True if any recorded state differs: containers, closures, globals, objects, classes, tensors, generators."""
        return (
            super().changed
            or any(now != then for now, then in self._sets)
            or any(getattr(thing, name, _MISSING) is not then for thing, name, then in self._slots)
            or any(not _same(dict(vars(kind)), then) for kind, then in self._classes)
            or any(not _equal(read(), then) for read, _, then in self._states)
        )

    def restore(self) -> None:
        """Give everything that has changed what it had."""
        super().restore()
        for now, elements in self._sets:
            now.clear()
            now.update(elements)
        for thing, name, value in self._slots:
            if getattr(thing, name, _MISSING) is not value:
                delattr(thing, name) if value is _MISSING else setattr(thing, name, value)
        for kind, attributes in self._classes:
            now_has = dict(vars(kind))
            for name in now_has.keys() - attributes.keys():
                delattr(kind, name)
            for name, value in attributes.items():
                if now_has.get(name, _MISSING) is not value:
                    setattr(kind, name, value)
        for read, write, state in self._states:
            if not _equal(read(), state):
                write(state)

    def _keep(self, thing: Any) -> None:
        self._waiting.append(thing)  # and not at once: they may hold one another to any depth

    def _keep_now(self, thing: Any) -> None:
        if id(thing) in self._seen or thing is None or isinstance(thing, bool | int | float | str):
            return
        if isinstance(thing, set | frozenset | deque | functools.partial):
            self._seen[id(thing)] = thing
        if isinstance(thing, set):
            self._sets.append((thing, set(thing)))
            self._keep_all(thing)
        elif isinstance(thing, frozenset):
            self._keep_all(thing)
        elif isinstance(thing, deque):
            self._containers.append((thing, list(thing)))
            self._keep_all(thing)
        elif isinstance(thing, functools.partial):
            self._keep_all([thing.func, thing.args, thing.keywords])
        elif (state := _state_of(thing, MOST_BYTES - self._bytes)) is not None:
            self._bytes += getattr(thing, "nbytes", 0)
            self._seen[id(thing)] = thing
            read, write = state
            self._states.append((read, write, read()))
        elif isinstance(thing, type):
            self._keep_class(thing)
        elif isinstance(thing, FunctionType) and _of_a_library(thing):
            self._seen[id(thing)] = thing
        elif isinstance(thing, MethodType):
            self._keep_all([thing.__func__, thing.__self__, getattr(thing.__self__, "__dict__", None)])
        elif isinstance(thing, BuiltinMethodType):  # such as a list's append
            self._keep(thing.__self__)
        elif isinstance(thing, functools._lru_cache_wrapper):
            self._keep(thing.__wrapped__)
        elif _has_own_attributes(thing):
            self._seen[id(thing)] = thing
            self._keep(getattr(thing, "__dict__", None))
            self._keep(type(thing))
            for name in _slots(type(thing)):
                self._slots.append((thing, name, getattr(thing, name, _MISSING)))
                self._keep(getattr(thing, name, None))
        elif isinstance(thing, Iterator):
            raise NotRecordable(f"goes on with a {type(thing).__name__}, which cannot be put back")
        else:
            super()._keep(thing)

    def _keep_class(self, kind: type) -> None:
        self._seen[id(kind)] = kind
        if not of_another_pack(kind):
            return
        self._classes.append((kind, dict(vars(kind))))
        for value in vars(kind).values():
            inner = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            self._keep_all([inner.fget, inner.fset] if isinstance(inner, property) else [inner])
        self._keep_all(kind.__bases__)

    def _keep_names(self, function: FunctionType) -> None:
        if not _may_remember(function):
            super()._keep_names(function)
            return
        used = {*names_in(function.__code__)}
        spaces = [function.__globals__]
        spaces += [
            vars(value)
            for name in used
            if isinstance(value := function.__globals__.get(name), ModuleType) and of_another_pack(value)
        ]
        for space in spaces:
            for name in used:
                value = space.get(name, _MISSING)
                if not isinstance(value, ModuleType):
                    self._globals.append((space, name, value))
                    self._keep(value)


def _of_a_library(function: FunctionType) -> bool:
    """Return True if a library defines the function: not ComfyUI, this pack or another pack, and no decorator of theirs."""
    file = getattr(sys.modules.get(function.__globals__.get("__name__", "")), "__file__", None) or ""
    return own(function) and not file.startswith(OWN_CODE)


def _may_remember(function: FunctionType) -> bool:
    """Return True if the function may keep state: another pack defines it, or a sampler module of ComfyUI that packs extend."""
    samplers = ("comfy.k_diffusion", "comfy.extra_samplers", "comfy.samplers")
    return not own(function) or str(function.__globals__.get("__name__")).startswith(samplers)


def _has_own_attributes(thing: Any) -> bool:
    """Return True if another pack defines the object's class, or if it is a SimpleNamespace or a threading.local."""
    if isinstance(thing, dict | list | tuple | FunctionType | ModuleType):
        return False
    return of_another_pack(type(thing)) or isinstance(thing, SimpleNamespace | threading.local)


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        yield from (name for name in ((slots,) if isinstance(slots, str) else slots) if not name.startswith("__"))


def _state_of(thing: Any, most: int) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """Return functions that read and restore the state of a tensor, array or random generator.

    Return None for other objects, and for tensors and arrays above `most` bytes.
    """
    if any(thing is each for each in (torch.default_generator, random._inst, np.random.mtrand._rand)):  # see Generators
        return None
    if type(thing) in (torch.Tensor, torch.nn.Parameter) and not thing.is_meta and thing.nbytes <= most:
        return lambda: thing.detach().clone(), functools.partial(_write, thing)
    if isinstance(thing, np.ndarray) and thing.nbytes <= most:
        return thing.copy, lambda then: np.copyto(thing, then)
    if isinstance(thing, bytearray):
        return lambda: bytes(thing), lambda then: thing.__setitem__(slice(None), then)
    if isinstance(thing, random.Random) and not isinstance(thing, random.SystemRandom):
        return thing.getstate, thing.setstate
    if isinstance(thing, torch.Generator):
        return thing.get_state, thing.set_state
    if isinstance(thing, np.random.RandomState):
        return thing.get_state, thing.set_state
    if isinstance(thing, np.random.Generator):
        return lambda: copy.deepcopy(thing.bit_generator.state), lambda then: setattr(
            thing.bit_generator, "state", then
        )
    return None


def _write(tensor: torch.Tensor, values: torch.Tensor) -> None:
    with torch.inference_mode():  # which ComfyUI's nodes make tensors in, and which lets others be written to as well
        tensor.copy_(values)


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

    def restore(self) -> None:
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
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(_equal(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other)
