"""Two lists of blocks that take turns, as in VACE: find after which block of one list each block of the other runs.

The result is for the file's own number of blocks.
"""

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
    """Return the units: each block of the first list, with the blocks of the second list that run directly after it.

    The order comes from a forward through as many blocks as the file has, in which each block returns its input.

    Args:
        subject: the small model and its calls.
        call: the call to run.
        blocks: the descriptions of the blocks of each list.
        order: the order in which the small model's blocks run.

    Returns:
        None if one list runs after the other.

    Raises:
        Undescribed: a declaration cannot express how the lists take turns, or some members of a list are unknown.
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
        return None  # only the small model's order is known
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
    """Return the blocks of the file's own model, in the order of their first calls."""
    seen: list[str] = []
    with _passed(subject, {path: each for path, each in blocks.items() if path != each[0].path}, seen):
        try:
            call.of(subject.model)
        except FAILS as error:
            raise Undescribed(f"its forward fails on a test call with all blocks ({in_a_line(error)})") from error
    return [*dict.fromkeys(seen)]


@contextmanager
def _passed(subject: Subject, blocks: Mapping[str, Sequence[Description]], seen: list[str]) -> Iterator[None]:
    """Make the lists as long as the file's. Each block notes its name in `seen` and returns its input."""
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
