"""Snapshots of the state of Python objects and random generators, to find and undo the changes that code makes."""

from __future__ import annotations

import contextlib
import functools
import operator
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from .source_code import names_in

MISSING = object()
"""The value that stands for an unbound name."""

TABLES = vars(nn.Module()).keys()
"""Attributes of `nn.Module` itself: parameters, buffers, submodules and hooks."""

ANOTHER_SEED = 0x9E3779B9


@dataclass(frozen=True)
class SavedState:
    """The saved value of one piece of state.

    Attributes:
        read: returns the current value.
        write: restores a value.
        value: the saved value.
        equal: compares two values.
    """

    read: Callable[[], Any]
    write: Callable[[Any], object]
    value: Any
    equal: Callable[[Any, Any], bool] = operator.is_

    @property
    def changed(self) -> bool:
        """Return True if the current value differs from the saved value."""
        return not self.equal(self.read(), self.value)


class StateSnapshot:
    """A snapshot of the contents of containers, and of the closures, defaults, attributes and globals of functions.

    Tensors and other objects are compared by identity, except ComfyUI's conditioning objects (`comfy.conds`): their
    attributes are saved.

    Args:
        roots: the objects from which the snapshot follows references.
    """

    def __init__(self, roots: Iterable[Any] = ()) -> None:
        self._seen: dict[int, Any] = {}  # keeps the objects alive, so that no other object gets their ids
        self._saved: list[SavedState] = []
        for root in roots:
            self._add(root)

    @property
    def changed(self) -> bool:
        """Return True if a piece of state differs from its saved value."""
        return any(state.changed for state in self._saved)

    def restore(self) -> None:
        """Restore the saved value of every piece of state that has changed."""
        for state in self._saved:
            if state.changed:
                state.write(state.value)

    def save_name(self, names: dict[str, Any], name: str, value: Any = MISSING) -> None:
        """Save the value of a name in a namespace; MISSING if the name is unbound."""
        self._saved.append(SavedState(lambda: names.get(name, MISSING), functools.partial(_bind, names, name), value))

    def save_contents(self, container: Any) -> None:
        """Save the contents of a dict, list, deque or set."""
        kind: Any = next((kind for kind in (dict, set) if isinstance(container, kind)), list)
        equal = operator.eq if isinstance(container, set) else same_items
        self._saved.append(SavedState(lambda: container, functools.partial(_refill, container), kind(container), equal))

    def _add(self, value: Any) -> None:
        if id(value) not in self._seen:
            self._seen[id(value)] = value
            self._save(value)

    def _save(self, value: Any) -> None:
        if isinstance(value, dict):
            self.save_contents(value)
            self._add_all(value.values())
        elif isinstance(value, list):
            self.save_contents(value)
            self._add_all(value)
        elif isinstance(value, tuple):
            self._add_all(value)
        elif isinstance(value, FunctionType):
            self._add_function(value)
        elif isinstance(value, MethodType):
            self._add(value.__func__)
            self._add(vars(value.__self__) if hasattr(value.__self__, "__dict__") else None)
        elif type(value).__module__ == "comfy.conds":
            self._add(vars(value))

    def _add_all(self, values: Iterable[Any]) -> None:
        for value in list(values):
            self._add(value)

    def _add_function(self, function: Any) -> None:
        for cell in function.__closure__ or ():
            contents = functools.partial(_contents, cell)
            self._saved.append(SavedState(contents, functools.partial(_fill, cell), contents()))
            self._add(contents())
        self._add(getattr(function, "__wrapped__", None))
        self._add(function.__defaults__ or ())
        self._add(function.__dict__)
        self._add_globals(function)

    def _add_globals(self, function: FunctionType) -> None:
        for name in names_in(function.__code__) & function.__globals__.keys():
            value = function.__globals__[name]
            if isinstance(value, bool | int | float | str | None | list | dict):
                self.save_name(function.__globals__, name, value)
                self._add(value)


class ModuleStateSnapshot(StateSnapshot):
    """A snapshot of the attributes of a model's modules, except parameters, buffers, submodules and hooks, one level deep."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._namespaces = [(vars(module), frozenset(vars(module))) for module in model.modules()]
        for names, known in self._namespaces:
            for name in known - TABLES:
                self.save_name(names, name, names[name])
                if isinstance(names[name], dict | list | set):
                    self.save_contents(names[name])

    def keep_changes(self) -> None:
        """Keep only the attributes that code has changed or added since the snapshot, and drop all others."""
        for names, known in self._namespaces:
            for name in names.keys() - known:
                self.save_name(names, name, MISSING)
        self._saved = [state for state in self._saved if state.changed]


class StateLeak:
    """The state that forwards leave on a model's modules, such as cached text keys. It is restored before the next request.

    ComfyUI's HiDream-O1 looks up cached keys by the text and by a picture's memory address. Weights with another LoRA, or
    another picture at the same address, would get the keys of the previous request.

    Args:
        module: the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._leaks: list[StateSnapshot] = []

    def restore(self) -> None:
        """Restore the attributes that forwards have changed, the last change first."""
        while self._leaks:
            self._leaks.pop().restore()

    def find(self, before: ModuleStateSnapshot) -> None:
        """Find the attributes that a forward has changed since the snapshot `before`, which `state` returned."""
        before.keep_changes()
        self._leaks.append(before)

    def state(self) -> ModuleStateSnapshot:
        """Return a snapshot of the modules' attributes."""
        return ModuleStateSnapshot(self._module)


def same_items(first: Any, second: Any) -> bool:
    """Return True if two dicts have the same keys and identical values, or two sequences have identical elements."""
    if len(first) != len(second):
        return False
    if isinstance(first, dict):
        return all(first.get(key, MISSING) is value for key, value in second.items())
    return all(map(operator.is_, first, second))


def equal_values(first: Any, second: Any) -> bool:
    """Return True if two values are equal. Tensors, arrays and the members of collections are compared by value."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, np.ndarray):
        return bool(np.array_equal(first, second))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal_values(value, second[name]) for name, value in first.items())
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(equal_values, first, second))
    return bool(first == second)


def _bind(names: dict[str, Any], name: str, value: Any) -> None:
    if value is MISSING:
        names.pop(name, None)
    else:
        names[name] = value


def _refill(container: Any, contents: Any) -> None:
    container.clear()
    (container.update if isinstance(container, dict | set) else container.extend)(contents)


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def _fill(cell: CellType, contents: Any) -> None:
    if contents is MISSING:
        del cell.cell_contents
    else:
        cell.cell_contents = contents


class Generators:
    """A snapshot of the global random generators of torch, numpy and Python, on all devices that are in use."""

    def __init__(self) -> None:
        self._devices = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._before = self._after = self._states()

    @property
    def moved(self) -> bool:
        """Return True if code had drawn numbers or set a seed by the last `restore`."""
        return any(self._moved())

    def restore(self) -> None:
        """Set all generators to the states of the snapshot, and remember the states that they had."""
        self._after = self._states()
        self._set(self._before)

    @contextlib.contextmanager
    def another_state(self) -> Iterator[Generators]:
        """Provide a snapshot of generators in another state, and restore this snapshot's states at the end of the context."""
        torch.default_generator.manual_seed(ANOTHER_SEED)
        if self._devices:
            torch.cuda.manual_seed_all(ANOTHER_SEED)
        np.random.seed(ANOTHER_SEED)
        random.seed(ANOTHER_SEED)
        try:
            yield Generators()
        finally:
            self._set(self._before)

    def seeded_like(self, rerun: Generators) -> bool:
        """Return True if the code seeded all generators that it used, so that a rerun from another state left the same states.

        Args:
            rerun: the snapshot around the rerun, from `another_state`.
        """
        pairs = zip(self._moved(), self._after, rerun._after, strict=True)
        return all(equal_values(first, second) for moved, first, second in pairs if moved)

    def _moved(self) -> list[bool]:
        return [not equal_values(*pair) for pair in zip(self._after, self._before, strict=True)]

    def _set(self, states: tuple[Any, Any, Any, Any]) -> None:
        cpu, legacy, python, devices = states
        torch.set_rng_state(cpu)
        np.random.set_state(legacy)
        random.setstate(python)
        if self._devices:
            torch.cuda.set_rng_state_all(devices)

    def _states(self) -> tuple[Any, Any, Any, Any]:
        devices = torch.cuda.get_rng_state_all() if self._devices else []
        return torch.get_rng_state(), np.random.get_state(), random.getstate(), devices
