"""Lists of blocks that take turns, as VACE's: which of the one runs behind which of the other, at the file's own depth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..models.comfyui.proof.ranks import in_a_line
from ..models.spread.blocks import Doorway
from ..models.spread.functions import Turns
from .calls import FAILS, ModelCall, Subject
from .describing import Description
from .lists import set_members
from .undescribed import Undescribed
from .values import by_name


@torch.inference_mode()
def turns_of(subject: Subject, call: ModelCall, blocks: Mapping[str, Sequence[Description]]) -> Turns:
    """Which blocks run as one: those of the first list, each with those of the other one that run right behind it.

    The order is seen in a forward through as many blocks as the file has, each of which gives back what it is given.

    Raises:
        Undescribed: more than two lists take turns, or that forward fails.
    """
    if len(blocks) != 2:
        raise Undescribed(f"its blocks of {' and '.join(blocks)} take turns")
    first, other = blocks
    seen: list[str] = []
    with _passed(subject, blocks, seen):
        try:
            call.of(subject.model)
        except FAILS as error:
            raise Undescribed(f"its forward fails on a small call with all blocks ({in_a_line(error)})") from error
    order = [path.rpartition(".")[0] for path in dict.fromkeys(seen)]
    return Turns(first, other, tuple(order[:at].count(first) - 1 for at, path in enumerate(order) if path == other))


@contextmanager
def _passed(subject: Subject, blocks: Mapping[str, Sequence[Description]], seen: list[str]) -> Iterator[None]:
    """Have the lists as long as the file's, and their blocks note their names and give back what they are given."""
    model = subject.model
    lists = {path: [*model.get_submodule(path).children()] for path in blocks}
    for path, known in blocks.items():
        length = subject.lengths.get(path, len(lists[path]))
        ways = ((f"{path}.{number}", known[min(number, len(known) - 1)]) for number in range(length))
        set_members(model, path, [Doorway(_passing(name, block, seen), block.probe.run.module) for name, block in ways])
    try:
        yield
    finally:
        for path, members in lists.items():
            set_members(model, path, members)


def _passing(path: str, block: Description, seen: list[str]) -> Callable[..., Any]:
    run = block.probe.run

    def way(*args: Any, **kwargs: Any) -> Any:
        seen.append(path)
        values = by_name(run.module, args, kwargs)
        given = [values[name] for name in block.returns]
        return tuple(given) if isinstance(run.returned, (tuple, list)) else given[0]

    return way
