"""What a declaration says of one block, by probing it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import Refused
from ..models.spread import declaration as d
from .looking import Run
from .probing import Followed, Probe
from .tokens import NOTHING, Tokens
from .values import opaque, tensors_in
from .writing import Written

MULTIPLES = [2**power for power in range(1, 10)]
"""To which models may pad the picture's tokens."""

Place = tuple[str, int]
"""An argument, and which of its tensors."""


@dataclass(frozen=True)
class Site:
    """One call of a block at one size: where the picture's tokens lie in its tensors, and which of these the text reaches."""

    run: Run
    tokens: Mapping[Place, Tokens]
    text: frozenset[Place]
    batch: int


@dataclass(frozen=True)
class Described:
    """One block. Of kinds of streams and of arguments those that fit what was seen, the likeliest first."""

    streams: Mapping[str, Sequence[d.StreamKind]]
    arguments: Mapping[str, Sequence[d.Argument]]
    attentions: tuple[d.Attention, ...]
    returns: tuple[str, ...]
    attends_in: str
    heads: tuple[int, int] | None


def describe(sites: Sequence[Site]) -> Described:
    """Of a block, seen at several sizes, what fits all of them.

    Raises:
        Refused: there is no word for something that it does.
    """
    return _Description(sites).made()


class _Description:
    def __init__(self, sites: Sequence[Site]) -> None:
        self._sites = sites
        self._site = site = sites[0]
        self._path = site.run.path
        self._probe = Probe(site.run)
        self._dims: dict[str, tuple[int, ...]] = {}
        self._lengths: dict[str, int] = {}
        self._follows: dict[str, Followed] = {}
        values = site.run.values
        for name, value in values.items():
            if unseen := opaque(value):
                raise Refused(f"{self._path} is given an object of the class {unseen} as {name}, which cannot be looked into.")
            found = [site.tokens.get((name, number)) for number in range(len(tensors_in(value)))]
            if not any(found):
                continue
            if not isinstance(value, Tensor):
                raise Refused(f"{self._path} is given the picture's tokens in a {type(value).__name__} as {name}.")
            tokens = found[0]
            assert tokens is not None
            along = range(tokens.dim, tokens.dim + (len(tokens.step) if tokens.grid else 1))
            self._note(name, tuple(along))
        self._pictured = tuple(self._dims)
        beside = [name for name, value in values.items() if name not in self._dims and _may_be_tokens(value)]
        for name in sorted(beside, key=lambda name: (name, 0) not in site.text):
            self._note(name, (1,))
        self._calls = [self._attention(number) for number in range(len(self._probe.attentions))]

    def _note(self, name: str, dims: tuple[int, ...]) -> None:
        """A tensor that may be tokens."""
        shape = self._site.run.values[name].shape
        self._dims[name], self._lengths[name] = dims, math.prod(shape[dim] for dim in dims)
        self._follows[name] = self._probe.follow(name, 0, dims)

    def made(self) -> Described:
        values = self._site.run.values
        spread = [name for attention, _ in self._calls if isinstance(attention, d.Spread) for name in attention.streams]
        carried = [name for name in self._dims if name in self._pictured or name in spread or self._is_carried(name)]
        names = [name for name in values if name in carried]
        streams = {name: tuple(self._kinds(name)) for name in names}
        arguments = {
            name: tuple(self._argument(name, names))
            for name, value in values.items()
            if name not in names and value is not None
        }
        given = [attention for attention, _ in self._calls]
        within = {each.attends_in for each in self._probe.attentions}
        if len(within) > 1:
            raise Refused(f"{self._path} calls attention in several ways ({', '.join(sorted(within))}).")
        return Described(
            streams, arguments, tuple(given), self._returns(names), "".join(within), self._heads(given)
        )

    def _heads(self, given: Sequence[d.Attention]) -> tuple[int, int] | None:
        """Of the first attention that is spread, and their width."""
        for attention, operands in zip(given, self._probe.attentions, strict=True):
            if isinstance(attention, d.Spread):
                return operands.given.q.shape[1], operands.given.q.shape[3]
        return None

    def _laid(self, operand: str, number: int) -> tuple[str, ...]:
        """The tensors whose tokens an operand has, one behind the other; empty where it is laid in another way."""
        found = {name: getattr(followed, operand)[number] for name, followed in self._follows.items()}
        order: list[str] = []
        at, length = 0, next(iter(found.values())).numel() if found else 0
        while at < length:
            fits = (name for name, codes in found.items() if _is_run(codes[at : at + self._lengths[name]], self._lengths[name]))
            name = next(fits, None)
            if name is None or name in order:
                return ()
            order.append(name)
            at += self._lengths[name]
        return tuple(order)

    def _attention(self, number: int) -> tuple[d.Attention, tuple[str, ...]]:
        """The kind of an attention, and whose tokens its queries are."""
        given = self._probe.attentions[number].given
        keys, queries = self._laid("v", number), self._laid("q", number)
        follows = [getattr(self._follows[name], each)[number] for name in self._pictured for each in ("k", "v")]
        pictured = any(bool((codes != NOTHING).any()) for codes in follows)
        at, alike = 0, given.q.shape[2] == given.k.shape[2] and bool(keys)
        for name in keys:
            run = self._follows[name].q[number][at : at + self._lengths[name]]
            alike, at = alike and _is_run(run, self._lengths[name]), at + self._lengths[name]
        if alike:
            return d.Spread(keys, kv_heads=_shared_heads(given.q, given.k, given.v)), keys
        if pictured:
            raise Refused(f"attention {number + 1} of {self._path} has keys of the picture's tokens that are not laid as its queries.")
        return d.Local(), queries

    def _is_carried(self, name: str) -> bool:
        """Whether text is given back token by token."""
        codes = self._follows[name].returned
        return (name, 0) in self._site.text and any(_is_run(each, self._lengths[name]) for each in codes)

    def _kinds(self, name: str) -> Iterator[d.StreamKind]:
        if name not in self._pictured:
            yield d.Beside()
            return
        seen = [site.tokens.get((name, 0)) for site in self._sites]
        tokens = [each for each in seen if each is not None]
        first = tokens[0]
        if len(tokens) < len(seen) or {(each.dim, each.grid, each.step) for each in tokens} != {(first.dim, first.grid, first.step)}:
            raise Refused(f"where {self._path} has the picture's tokens in {name} changes with the latent's size.")
        for rule in _starts([(each.length, each.count, each.start) for each in tokens]):
            more: dict[str, Any] = {} if rule is None else {"start": rule}
            yield d.Pictured(grid=first.grid, dim=first.dim, **more)

    def _returns(self, names: Sequence[str]) -> tuple[str, ...]:
        returned = self._site.run.returned
        values = list(returned) if isinstance(returned, (tuple, list)) else [returned]
        if not all(value is None or isinstance(value, Tensor) for value in values):
            raise Refused(f"{self._path} returns something besides tensors.")
        found: list[str] = []
        number = 0
        for value in values:
            if value is None:
                found.append("")
                continue
            fits = [name for name in names if _is_run(self._follows[name].returned[number], self._lengths[name])]
            if not fits:
                raise Refused(f"value {len(found) + 1} that {self._path} returns has not the tokens of what it is given.")
            found.append(next((name for name in fits if name not in found), fits[0]))
            number += 1
        left = [name for name in names if name not in found]
        return tuple(name or left.pop(0) for name in found) if len(left) >= found.count("") else tuple(name or names[0] for name in found)

    def _argument(self, name: str, streams: Sequence[str]) -> list[d.Argument]:
        """What fits all tensors of an argument."""
        count = len(self._probe.tensors(name))
        if any(len(tensors_in(site.run.values.get(name))) != count for site in self._sites):
            raise Refused(f"how many tensors {self._path} is given as {name} changes with the latent's size.")
        if not count:
            return [*self._number(name, streams)]
        kinds = [[*self._kind(name, number, streams)] for number in range(count)]
        vectors = [each[0] for each in kinds if isinstance(each[0], d.Same)]
        if len(vectors) == count:
            return [d.Same(tuple(sorted({row for each in vectors for row in each.rows})))]
        return [kind for kind in kinds[0] if all(kind in each for each in kinds)]

    def _number(self, name: str, streams: Sequence[str]) -> Iterator[d.Argument]:
        """Of what has no tensor in it: the same for all, or a place that goes with the size."""
        values = [site.run.values.get(name) for site in self._sites]
        if all(isinstance(value, int) for value in values) and len({*values}) > 1:
            for stream in streams:
                lengths = [self._length(site, stream) for site in self._sites]
                tokens = [site.tokens.get((stream, 0)) for site in self._sites]
                edges = [{each.start, each.start + each.count} if each else {*()} for each in tokens]
                if stream not in self._pictured and values == lengths:
                    yield d.TextLength(stream)
                if values == lengths or all(value in edge for value, edge in zip(values, edges, strict=True)):
                    yield d.Boundary(stream)
        yield d.Same()

    def _kind(self, name: str, number: int, streams: Sequence[str]) -> Iterator[d.Argument]:
        tensor = self._probe.tensors(name)[number]
        if not (tensor.is_floating_point() or tensor.is_complex()):
            yield from self._hidden(name, tensor, streams)
            return
        reached = self._probe.reached(name, number)
        touched = [bool((codes != NOTHING).any()) for codes in (*reached.q, *reached.returned)]
        if not any(touched):
            inside = any(bool((codes != NOTHING).any()) for codes in (*reached.k, *reached.v))
            yield from [d.Attended()] if inside else self._hidden(name, tensor, streams)
            return
        for dim in range(max(1, tensor.ndim - 1)):
            if tensor.shape[dim] > 1:
                kind = self._along(self._probe.follow(name, number, (dim,)), dim, tensor, streams)
                if kind is not None and self._fits(kind, name, number):
                    yield kind
                    return
        if self._fits(d.Same(), name, number) and (rows := _rows(tensor, self._site.batch)):
            yield d.Same((rows,))
        yield d.Attended()

    def _along(self, followed: Followed, dim: int, tensor: Tensor, streams: Sequence[str]) -> d.Argument | None:
        """What says whose tokens a dimension goes with: those of queries, or else of what is returned."""
        places = [(laid, codes) for (_, laid), codes in zip(self._calls, followed.q, strict=True) if {*laid} <= {*streams}]
        for name, codes in zip(self._returns(streams), followed.returned, strict=False):
            places.append(((name,), codes))
        for laid, codes in places:
            runs = [*zip(laid, codes.split([self._lengths[name] for name in laid]), strict=True)]
            with_it = [(name, run) for name, run in runs if bool((run != NOTHING).any())]
            if with_it and _is_run(torch.cat([run for _, run in with_it]), tensor.shape[dim]):
                return d.Along(tuple(name for name, _ in with_it), dim)
            if len(with_it) == 1 and dim == 1 and self._by_frame(*with_it[0], tensor.shape[1]):
                return d.ByFrame(with_it[0][0], tensor.ndim)
        return None

    def _by_frame(self, name: str, codes: Tensor, rows: int) -> bool:
        each = self._lengths[name] // rows
        return each * rows == codes.numel() and torch.equal(codes, torch.arange(rows).repeat_interleave(each))

    def _hidden(self, name: str, tensor: Tensor, streams: Sequence[str]) -> Iterator[d.Argument]:
        """Of what no token shows: a mask of text, or what goes with keys that every rank has."""
        beside = [stream for stream in streams if stream not in self._pictured]
        for stream in beside:
            lengths = [self._length(site, stream) for site in self._sites]
            sizes = [tensors_in(site.run.values[name])[0].shape[-1] for site in self._sites]
            if sizes == lengths:
                yield d.TextMask(stream)
            for other in streams:
                more = [length + self._length(site, other) for length, site in zip(lengths, self._sites, strict=True)]
                if other != stream and sizes == more:
                    before = next((laid.index(other) < laid.index(stream) for _, laid in self._calls if {stream, other} <= {*laid}), False)
                    yield d.TextMask(stream, before=(other,)) if before else d.TextMask(stream, behind=(other,))
        yield d.Attended()

    def _fits(self, kind: d.Argument, name: str, number: int) -> bool:
        """Whether a tensor's shapes at the other sizes are those of its kind."""
        shapes = [tensors_in(site.run.values[name])[number].shape for site in self._sites]
        if isinstance(kind, d.Along):
            return all(
                shape[kind.dim] == sum(self._length(site, stream) for stream in kind.streams)
                for shape, site in zip(shapes, self._sites, strict=True)
            )
        return not isinstance(kind, d.Same) or len({*shapes}) == 1

    def _length(self, site: Site, stream: str) -> int:
        value = site.run.values[stream]
        return math.prod(value.shape[dim] for dim in self._dims[stream])


def _may_be_tokens(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 3 and value.is_floating_point() and value.shape[1] > 1


def _is_run(codes: Tensor, length: int) -> bool:
    """Whether places follow the indices one by one."""
    return codes.numel() == length and torch.equal(codes, torch.arange(length))


def _rows(tensor: Tensor, batch: int) -> int:
    """How many vectors for each of the batch a tensor has; 0 where it has not the same number for each."""
    if tensor.ndim < 2:
        return 1
    between = math.prod(tensor.shape[1:-1])
    if tensor.shape[0] in (1, batch):
        return between
    return tensor.shape[0] // batch if between == 1 and tensor.shape[0] % batch == 0 else 0


def _shared_heads(q: Tensor, k: Tensor, v: Tensor) -> int:
    """The heads of keys and values `[batch, heads, ...]` where heads of queries share them; 0 where each has its own."""
    heads = k.shape[1]
    for count in range(1, heads):
        if heads % count == 0 and all(_repeats(x, count) for x in (k, v)):
            return count
    return 0 if heads == q.shape[1] else heads


def _repeats(x: Tensor, count: int) -> bool:
    apart = x.unflatten(1, (count, -1))
    return torch.equal(apart, apart[:, :, :1].expand_as(apart))


def _starts(seen: Sequence[tuple[int, int, int]]) -> Iterator[Callable[[int, int], int] | None]:
    """Rules for where a run of tokens begins, from (length, picture, start); None for the vocabulary's own, at 0."""
    if all(start == 0 for _, _, start in seen):
        yield None
        return
    if all(start == length - picture for length, picture, start in seen):
        yield Written("lambda length, picture: length - picture")
        return
    for multiple in MULTIPLES:
        if all(start == length - -(-picture // multiple) * multiple for length, picture, start in seen):
            yield Written(f"lambda length, picture: length - -(-picture // {multiple}) * {multiple}")
    if len({start for *_, start in seen}) == 1:
        yield Written(f"lambda length, picture: {seen[0][2]}")
    yield None  # where they come as they were laid before, no rule is asked
