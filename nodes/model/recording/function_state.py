"""State that functions of other packs keep between calls: recorded, compared and restored."""

from __future__ import annotations

import copy
import functools
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from ....parallel_backend.snapshot import MISSING, SavedState, StateSnapshot, equal_values, same_items
from ....parallel_backend.source_code import names_in
from ..own_code import OWN_CODE, of_another_pack, own
from .tape import NotRecordable

MAX_OBJECTS = 50_000
"""Largest number of objects in which a function may keep state. A large pack reaches some thousands."""

MAX_BYTES = 1 << 26
"""Largest number of bytes of all tensors and arrays that are compared by value. Any further ones are compared by identity."""


class FunctionStateSnapshot(StateSnapshot):
    """The state of functions of other packs, in all objects that they reach by name, in closures, objects and classes.

    Objects of ComfyUI, and of the libraries that it calls, are compared by identity alone.

    Raises:
        NotRecordable: there are more than MAX_OBJECTS objects, or one of them is an iterator. The position of an iterator (a
            generator object, `itertools.count`, an open file) cannot be restored.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self._bytes = 0
        self._waiting: list[Any] = []
        super().__init__(roots)
        while self._waiting:
            if len(self._seen) > MAX_OBJECTS:
                raise NotRecordable(f"can keep state in more than {MAX_OBJECTS} objects, which are too many to check")
            value = self._waiting.pop()
            if value is not None and not isinstance(value, bool | int | float | str):
                super()._add(value)

    def _add(self, value: Any) -> None:
        self._waiting.append(value)  # a queue instead of recursion, because objects may be nested to any depth

    def _save(self, value: Any) -> None:
        if isinstance(value, set | deque):
            self.save_contents(value)
            self._add_all(value)
        elif isinstance(value, frozenset):
            self._add_all(value)
        elif isinstance(value, functools.partial):
            self._add_all([value.func, value.args, value.keywords])
        elif (state := _state_of(value, MAX_BYTES - self._bytes)) is not None:
            self._bytes += getattr(value, "nbytes", 0)
            read, write = state
            self._saved.append(SavedState(read, write, read(), equal_values))
        elif isinstance(value, type):
            self._add_class(value)
        elif isinstance(value, FunctionType) and _of_a_library(value):
            return
        elif isinstance(value, MethodType):
            self._add_all([value.__func__, value.__self__, getattr(value.__self__, "__dict__", None)])
        elif isinstance(value, BuiltinMethodType):  # such as a list's append
            self._add(value.__self__)
        elif isinstance(value, functools._lru_cache_wrapper):
            self._add(value.__wrapped__)
        elif _has_own_attributes(value):
            self._add(getattr(value, "__dict__", None))
            self._add(type(value))
            for name in _slots(type(value)):
                read = functools.partial(getattr, value, name, MISSING)
                self._saved.append(SavedState(read, functools.partial(_set_attribute, value, name), read()))
                self._add(getattr(value, name, None))
        elif isinstance(value, Iterator):
            raise NotRecordable(f"reads from a {type(value).__name__}, whose position cannot be restored")
        else:
            super()._save(value)

    def _add_class(self, kind: type) -> None:
        if not of_another_pack(kind):
            return
        attributes = dict(vars(kind))
        read = functools.partial(_attributes, kind)
        self._saved.append(SavedState(read, functools.partial(_set_attributes, kind), attributes, same_items))
        for value in attributes.values():
            inner = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            self._add_all([inner.fget, inner.fset] if isinstance(inner, property) else [inner])
        self._add_all(kind.__bases__)

    def _add_globals(self, function: FunctionType) -> None:
        if not _may_remember(function):
            super()._add_globals(function)
            return
        used = names_in(function.__code__)
        spaces = [function.__globals__]
        spaces += [
            vars(value)
            for name in used
            if isinstance(value := function.__globals__.get(name), ModuleType) and of_another_pack(value)
        ]
        for space in spaces:
            for name in used:
                value = space.get(name, MISSING)
                if not isinstance(value, ModuleType):
                    self.save_name(space, name, value)
                    self._add(value)


def _attributes(kind: type) -> dict[str, Any]:
    return dict(vars(kind))


def _set_attributes(kind: type, attributes: dict[str, Any]) -> None:
    now = _attributes(kind)
    for name in now.keys() | attributes.keys():
        value = attributes.get(name, MISSING)
        if now.get(name, MISSING) is not value:
            _set_attribute(kind, name, value)


def _set_attribute(owner: Any, name: str, value: Any) -> None:
    if value is MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


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
    with torch.inference_mode():  # ComfyUI makes tensors in this mode; it allows writes to others too
        tensor.copy_(values)
