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

    def __init__(self, roots: Iterable[Any]) -> None:
        self._seen: dict[int, Any] = {}  # with the things, whose numbers no others get meanwhile
        self._containers: list[tuple[dict[Any, Any] | list[Any] | deque[Any], dict[Any, Any] | list[Any]]] = []
        self._cells: list[tuple[CellType, Any]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        for root in roots:
            self._keep(root)

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

    def _keep(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, dict):
            self._containers.append((value, dict(value)))
            self._keep_all(value.values())
        elif isinstance(value, list):
            self._containers.append((value, list(value)))
            self._keep_all(value)
        elif isinstance(value, tuple):
            self._keep_all(value)
        elif isinstance(value, FunctionType):
            self._keep_function(value)
        elif isinstance(value, MethodType):
            self._keep(value.__func__)
            self._keep(vars(value.__self__) if hasattr(value.__self__, "__dict__") else None)
        elif type(value).__module__ == "comfy.conds":
            self._keep(vars(value))

    def _keep_all(self, values: Iterable[Any]) -> None:
        for value in list(values):
            self._keep(value)

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

    def __init__(self, roots: Iterable[Any]) -> None:
        self._states: list[tuple[Callable[[], Any], Callable[[Any], object], Any]] = []
        self._classes: list[tuple[type, dict[str, Any]]] = []
        self._sets: list[tuple[set[Any], set[Any]]] = []
        self._slots: list[tuple[Any, str, Any]] = []
        self._bytes = 0
        self._waiting: list[Any] = []
        super().__init__(roots)
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
            or any(getattr(instance, name, _MISSING) is not then for instance, name, then in self._slots)
            or any(not _same(dict(vars(kind)), then) for kind, then in self._classes)
            or any(not _equal(read(), then) for read, _, then in self._states)
        )

    def restore(self) -> None:
        """Restore everything that has changed."""
        super().restore()
        for now, elements in self._sets:
            now.clear()
            now.update(elements)
        for instance, name, value in self._slots:
            if getattr(instance, name, _MISSING) is not value:
                delattr(instance, name) if value is _MISSING else setattr(instance, name, value)
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

    def _keep(self, value: Any) -> None:
        self._waiting.append(value)  # and not at once: they may hold one another to any depth

    def _keep_now(self, value: Any) -> None:
        if id(value) in self._seen or value is None or isinstance(value, bool | int | float | str):
            return
        if isinstance(value, set | frozenset | deque | functools.partial):
            self._seen[id(value)] = value
        if isinstance(value, set):
            self._sets.append((value, set(value)))
            self._keep_all(value)
        elif isinstance(value, frozenset):
            self._keep_all(value)
        elif isinstance(value, deque):
            self._containers.append((value, list(value)))
            self._keep_all(value)
        elif isinstance(value, functools.partial):
            self._keep_all([value.func, value.args, value.keywords])
        elif (state := _state_of(value, MOST_BYTES - self._bytes)) is not None:
            self._bytes += getattr(value, "nbytes", 0)
            self._seen[id(value)] = value
            read, write = state
            self._states.append((read, write, read()))
        elif isinstance(value, type):
            self._keep_class(value)
        elif isinstance(value, FunctionType) and _of_a_library(value):
            self._seen[id(value)] = value
        elif isinstance(value, MethodType):
            self._keep_all([value.__func__, value.__self__, getattr(value.__self__, "__dict__", None)])
        elif isinstance(value, BuiltinMethodType):  # such as a list's append
            self._keep(value.__self__)
        elif isinstance(value, functools._lru_cache_wrapper):
            self._keep(value.__wrapped__)
        elif _has_own_attributes(value):
            self._seen[id(value)] = value
            self._keep(getattr(value, "__dict__", None))
            self._keep(type(value))
            for name in _slots(type(value)):
                self._slots.append((value, name, getattr(value, name, _MISSING)))
                self._keep(getattr(value, name, None))
        elif isinstance(value, Iterator):
            raise NotRecordable(f"goes on with a {type(value).__name__}, which cannot be put back")
        else:
            super()._keep(value)

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


def _has_own_attributes(value: Any) -> bool:
    """Return True if another pack defines the object's class, or if it is a SimpleNamespace or a threading.local."""
    if isinstance(value, dict | list | tuple | FunctionType | ModuleType):
        return False
    return of_another_pack(type(value)) or isinstance(value, SimpleNamespace | threading.local)


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        yield from (name for name in ((slots,) if isinstance(slots, str) else slots) if not name.startswith("__"))


def _state_of(value: Any, most: int) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """Return functions that read and restore the state of a tensor, array or random generator.

    Return None for other objects, and for tensors and arrays above `most` bytes.
    """
    global_generators = (torch.default_generator, random._inst, np.random.mtrand._rand)  # see Generators
    if any(value is generator for generator in global_generators):
        return None
    if type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_meta and value.nbytes <= most:
        return lambda: value.detach().clone(), functools.partial(_write, value)
    if isinstance(value, np.ndarray) and value.nbytes <= most:
        return value.copy, lambda then: np.copyto(value, then)
    if isinstance(value, bytearray):
        return lambda: bytes(value), lambda then: value.__setitem__(slice(None), then)
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate, value.setstate
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, np.random.RandomState):
        return value.get_state, value.set_state
    if isinstance(value, np.random.Generator):
        return lambda: copy.deepcopy(value.bit_generator.state), lambda then: setattr(
            value.bit_generator, "state", then
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
    return all(current is previous for current, previous in zip(now, then, strict=True))


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
        self._then = self._states_after = self._states()

    @property
    def moved(self) -> bool:
        """Whether numbers had been drawn, or a seed given, when they were put back."""
        return any(self._moved())

    def restore(self) -> None:
        """Set all generators as if nothing had been drawn."""
        self._states_after = self._states()
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

    def seeded_like(self, rerun: Generators) -> bool:
        """Return True if the code seeded all generators that it used: a run from another state left them in the same
        state.
        """
        pairs = zip(self._moved(), self._states_after, rerun._states_after, strict=True)
        return all(_equal(first, second) for moved, first, second in pairs if moved)

    def _moved(self) -> list[bool]:
        return [not _equal(*pair) for pair in zip(self._states_after, self._then, strict=True)]

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


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, np.ndarray):
        return bool(np.array_equal(first, second))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_equal(value, second[name]) for name, value in first.items())
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(_equal(*pair) for pair in zip(first, second, strict=True))
    return bool(first == second)
