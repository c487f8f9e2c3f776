"""What a forward leaves on its modules, such as keys of a text that it takes for known: put back before the next request.

ComfyUI's HiDream-O1 knows such keys by the text and by where a picture lies in memory, so weights with another LoRA, or another
picture in the same place, would get those of the request before.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Any

from torch import nn

TABLES = vars(nn.Module()).keys()
"""What torch's own class has."""

Place = tuple[nn.Module, str]
_ABSENT = object()


class StateLeak:
    """The attributes of a model's modules that its forwards change, and what they were.

    Args:
        module: the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._changed: dict[Place, Any] = {}

    def restore(self) -> None:
        """Make what was changed what it was."""
        for (module, name), before in self._changed.items():
            if before is _ABSENT:
                vars(module).pop(name, None)
            else:
                setattr(module, name, before)
        self._changed = {}

    def find(self, before: dict[Place, Any]) -> None:
        """Look for what a forward has changed since `state`."""
        after = dict(_attributes(self._module))
        for attribute in before.keys() | after.keys():
            if not _same(before.get(attribute, _ABSENT), after.get(attribute, _ABSENT)):
                self._changed.setdefault(attribute, before.get(attribute, _ABSENT))

    def state(self) -> dict[Place, Any]:
        """What the modules have beside tensors and modules; of lists and dicts copies."""
        return {
            attribute: copy(value) if isinstance(value, (list, dict, set)) else value
            for attribute, value in _attributes(self._module)
        }


def _attributes(module: nn.Module) -> Iterator[tuple[Place, Any]]:
    for submodule in module.modules():
        yield from (((submodule, name), value) for name, value in vars(submodule).items() if name not in TABLES)


def _same(before: Any, after: Any) -> bool:
    """Whether it is the same object, or holds the same ones."""
    if type(before) is not type(after) or not isinstance(before, (list, dict, set)):
        return before is after
    if isinstance(before, dict):
        return [*map(id, before), *map(id, before.values())] == [*map(id, after), *map(id, after.values())]
    return [*map(id, before)] == [*map(id, after)]
