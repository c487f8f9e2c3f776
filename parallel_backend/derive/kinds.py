"""Argument kinds of a block's other arguments, found by probing the block: all kinds that fit, the likeliest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import declaration as d
from .describing import Description
from .probing import Followed
from .rules import Undescribed, is_repeated, is_run, rows
from .tokens import NOTHING
from .values import tensors_in


def argument_kinds(block: Description, name: str) -> list[d.Argument]:
    """Return the argument kinds that fit all tensors of an argument that is no stream, at all sizes.

    Raises:
        Undescribed: no kind fits.
    """
    count = len(block.probe.tensors(name))
    if any(len(tensors_in(site.run.values.get(name))) != count for site in block.sites):
        raise Undescribed(f"the number of tensors in {name} of {block.path} changes with the latent's size")
    if runs := [*_runs(block, name)]:
        return [*runs]
    if not count:
        return [*_of_number(block, name)]
    kinds = [[*_of_tensor(block, name, number)] for number in range(count)]
    vectors = [each[0] for each in kinds if isinstance(each[0], d.Replicated)]
    if len(vectors) == count:
        return [d.Replicated(tuple(sorted({row for each in vectors for row in each.vectors})))]
    return [kind for kind in kinds[0] if all(kind in each for each in kinds)]


def _runs(block: Description, name: str) -> Iterator[d.Argument]:
    """Yield the streams in which the argument's token ranges (pairs of a start and an end) may lie."""
    for stream in block.streams:
        ends = [block.length(stream, site) for site in block.sites]
        values = [site.run.values.get(name) for site in block.sites]
        if all(_are_runs(value, end) for value, end in zip(values, ends, strict=True)):
            yield d.TokenRanges(stream)


def _are_runs(value: Any, end: int) -> bool:
    def is_edge(edge: Any) -> bool:
        return edge is None or (isinstance(edge, int) and not isinstance(edge, bool) and 0 <= edge <= end)

    listed = isinstance(value, (list, tuple)) and bool(value)
    return listed and all(
        isinstance(run, (list, tuple)) and len(run) > 1 and all(map(is_edge, run[:2])) for run in value
    )


def _of_number(block: Description, name: str) -> Iterator[d.Argument]:
    """Yield the kinds of an argument without tensors: a position that changes with the size, or a value for all tokens."""
    values = [site.run.values.get(name) for site in block.sites]
    for stream, count in block.attended.items():
        if type(values[0]) is int and values[0] == count:
            yield d.TextLength(stream)
    if all(isinstance(value, int) for value in values) and len({*values}) > 1:
        for stream in block.streams:
            lengths = [block.length(stream, site) for site in block.sites]
            tokens = [site.tokens.get((stream, 0)) for site in block.sites]
            edges = [(each.start, each.start + each.count) if each else () for each in tokens]
            if values == lengths and stream not in block.pictured:
                yield d.TextLength(stream)
            if values == lengths or all(value in edge for value, edge in zip(values, edges, strict=True)):
                yield d.TokenPosition(stream)
    yield d.Replicated()


def _of_tensor(block: Description, name: str, number: int) -> Iterator[d.Argument]:
    tensor = block.probe.tensors(name)[number]
    if not (tensor.is_floating_point() or tensor.is_complex()):
        yield from _hidden(block, name)
        return
    reached = block.probe.reached(name, number)
    if not _touches((*reached.q, *reached.returned)):
        if not _touches((*reached.k, *reached.v)):
            yield from _hidden(block, name)
            return
        parts = _parts(block, name, number)
        yield parts or d.ReplicatedContext()
        return
    shapes = [tensors_in(site.run.values[name])[number].shape for site in block.sites]
    for dim in range(max(1, tensor.ndim - 1)):
        kind = _along(block, block.probe.follow(name, number, (dim,)), dim, tensor) if tensor.shape[dim] > 1 else None
        if isinstance(kind, d.PerFrame) or (isinstance(kind, d.PerToken) and _has_entry_per_token(block, kind, shapes)):
            if isinstance(kind, d.PerFrame) and block.parts and (parts := _parts(block, name, number)):
                yield parts  # a block whose tokens lie in parts gets all input of a frame by parts
            yield kind
            return
    if parts := _parts(block, name, number):
        yield parts
        return
    count = rows(tensor, block.sites[0].batch)
    if count and len({*shapes}) == 1:
        yield d.Replicated((count,))
    yield d.ReplicatedContext()


def _along(block: Description, followed: Followed, dim: int, tensor: Tensor) -> d.Argument | None:
    """Return the kind of a dimension that has an entry per token, found in the queries or else in the returned tensors."""
    laid = [each for each in zip(block.queries, followed.q, strict=True) if {*each[0]} <= {*block.streams}]
    laid += [((name,), positions) for name, positions in zip(block.returns, followed.returned, strict=False)]
    for names, positions in laid:
        if sum(map(block.length, names)) != positions.numel():
            continue
        runs = zip(names, positions.split([*map(block.length, names)]), strict=True)
        going = [(name, run) for name, run in runs if _touches((run,))]
        if going and is_run(torch.cat([run for _, run in going]), tensor.shape[dim]):
            return d.PerToken(tuple(name for name, _ in going), dim)
        if len(going) == 1 and dim == 1 and is_repeated(going[0][1], tensor.shape[1]):
            return d.PerFrame(going[0][0], tensor.ndim)
    return None


def _parts(block: Description, name: str, number: int) -> d.PerFramePart | None:
    """Return the kind of an argument whose rows along dimension 1 each belong to one part of a stream's tokens, or None."""
    tensor, stream = block.probe.tensors(name)[number], block.returns[0]
    own = block.probe.mixed_into(name, number, 0) if tensor.ndim > 2 else torch.ones(0)
    part = int(own.sum())
    if own.numel() != block.length(stream) or part in (0, own.numel()):
        return None
    rows = [own, *(block.probe.mixed_into(name, number, row) for row in range(1, tensor.shape[1]))]
    rows_per_part = next((at for at, row in enumerate(rows) if not torch.equal(row, own)), len(rows))
    if not all(
        torch.equal(row, torch.arange(own.numel()) // part == at // rows_per_part) for at, row in enumerate(rows)
    ):
        return None
    of_a_frame = block.tokens_of_a_frame(stream) // part
    if of_a_frame == 0:  # sound with fewer moments than frames
        return None
    counts = [tensors_in(site.run.values[name])[number].shape[1] // rows_per_part for site in block.sites]
    covered = [
        count * (block.tokens_of_a_frame(stream, site) // of_a_frame)
        for count, site in zip(counts, block.sites, strict=True)
    ]
    block.parts = of_a_frame
    if covered == [site.tokens[stream, 0].count for site in block.sites]:
        return d.PerFramePart(stream, rows_per_part)
    return (
        d.PerFramePart(stream, rows_per_part, with_references=True)
        if covered == [block.length(stream, site) for site in block.sites]
        else None
    )


def _has_entry_per_token(block: Description, kind: d.PerToken, shapes: Sequence[Sequence[int]]) -> bool:
    lengths = [sum(block.length(stream, site) for stream in kind.streams) for site in block.sites]
    return [shape[kind.dim] for shape in shapes] == lengths


def _hidden(block: Description, name: str) -> Iterator[d.Argument]:
    """Yield the kinds of an argument that changes no token's queries: a mask of text, or keys that every rank has."""
    sizes = [tensors_in(site.run.values[name])[0].shape[-1] for site in block.sites]
    for stream in (each for each in block.streams if each not in block.pictured):
        lengths = [block.length(stream, site) for site in block.sites]
        if sizes == lengths:
            yield d.TextMask(stream)
        for other_stream in block.streams:
            more = [
                length + block.length(other_stream, site) for length, site in zip(lengths, block.sites, strict=True)
            ]
            if other_stream != stream and sizes == more:
                laid = next(
                    (names for names in block.queries if {stream, other_stream} <= {*names}), (other_stream, stream)
                )
                before = laid.index(other_stream) < laid.index(stream)
                yield (
                    d.TextMask(stream, before=(other_stream,)) if before else d.TextMask(stream, after=(other_stream,))
                )
    yield d.ReplicatedContext()


def _touches(followed: Sequence[Tensor]) -> bool:
    return any(bool((positions != NOTHING).any()) for positions in followed)
