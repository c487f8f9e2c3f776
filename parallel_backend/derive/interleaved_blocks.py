"""Lists of blocks that take turns, as VACE's: which of the one runs behind which of the other, at the file's own depth."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..declaration import InterleavedBlocks
from ..models.comfyui.proof.ranks import in_a_line
from ..models.comfyui.reduced import set_members
from ..models.sequence_parallel.blocks import BlockHook
from .calls import FAILS, ModelCall, Subject
from .describing import Description
from .groups import members_of, not_apart
from .rules import Undescribed
from .values import by_name


@torch.inference_mode()
def interleaved_blocks_of(
    subject: Subject, call: ModelCall, blocks: Mapping[str, Sequence[Description]], order: Sequence[str]
) -> InterleavedBlocks | None:
    """Which blocks run as one: those of the first list, each with those of the other one that run right behind it.

    The order is seen in a forward through as many blocks as the file has, each of which gives back what it is given.

    Args:
        order: that in which the small model's blocks run.

    Returns:
        None where one list runs behind the other.

    Raises:
        Undescribed: they take turns in a way that has no name, or not all members of a list are known.
    """
    known = [path for members in blocks.values() for path in (block.path for block in members)]
    partly = next(
        (group for group, descriptions in blocks.items() if len(descriptions) < len(members_of(subject.model, group))),
        "",
    )
    try:
        groups = [path.rpartition(".")[0] for path in _order(subject, call, blocks)] if len(blocks) > 1 else []
    except Undescribed:
        if known != [*order] or partly:
            raise
        return None  # the small model's order is all that there is to see
    runs = [group for group, _ in itertools.groupby(groups)]
    if len(runs) == len({*runs}):
        if partly:
            raise not_apart(partly)
        return None
    if len(blocks) != 2:
        raise Undescribed(f"its blocks of {' and '.join(blocks)} take turns")
    first, second = blocks
    return InterleavedBlocks(
        first, second, tuple(groups[:at].count(first) - 1 for at, path in enumerate(groups) if path == second)
    )


def _order(subject: Subject, call: ModelCall, blocks: Mapping[str, Sequence[Description]]) -> list[str]:
    """The blocks of the file's own model, in the order in which they run first."""
    seen: list[str] = []
    with _passed(subject, {path: each for path, each in blocks.items() if path != each[0].path}, seen):
        try:
            call.of(subject.model)
        except FAILS as error:
            raise Undescribed(f"its forward fails on a small call with all blocks ({in_a_line(error)})") from error
    return [*dict.fromkeys(seen)]


@contextmanager
def _passed(subject: Subject, blocks: Mapping[str, Sequence[Description]], seen: list[str]) -> Iterator[None]:
    """Have the lists as long as the file's, and their blocks note their names and give back what they are given."""
    model = subject.model
    lists = {path: [*model.get_submodule(path).children()] for path in blocks}
    for path, known in blocks.items():
        length = subject.lengths.get(path, len(lists[path]))
        ways = ((f"{path}.{number}", known[min(number, len(known) - 1)]) for number in range(length))
        set_members(
            model, path, [BlockHook(_passing(name, block, seen), block.probe.run.module) for name, block in ways]
        )
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
        streams = [values[name] for name in block.returns]
        return tuple(streams) if isinstance(run.returned, (tuple, list)) else streams[0]

    return way
