"""The description of one block, found by probing: its streams, its attentions and its return values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from msgspec.structs import replace
from torch import Tensor

from .. import declaration as d
from ..declaration import AlignedToEnd, TokensOfLatents
from ..models.sequence_parallel.picture import Picture
from .probing import Followed, Probe
from .rules import Undescribed, is_run, shared_heads, starts
from .tokens import NOTHING, Tokens
from .tracing import ModuleCall
from .values import tensors_in, unreadable

ArgumentTensor = tuple[str, int]
"""An argument's name, and the number of a tensor in it."""


@dataclass(frozen=True)
class CallSite:
    """One call of a block at one size, with the positions of the picture's tokens in the block's tensors.

    Attributes:
        run: the call.
        tokens: the picture's tokens in each tensor that has them.
        text: the tensors that the text reaches.
        batch: rows of the latent.
        frames: frames of the latent.
        latents: the shapes of the other latents that the model receives, by argument name.
    """

    run: ModuleCall
    tokens: Mapping[ArgumentTensor, Tokens]
    text: frozenset[ArgumentTensor]
    batch: int
    frames: int
    latents: Mapping[str, Sequence[tuple[int, ...]]]


class Description:
    """One block, seen at several sizes.

    Attributes:
        sites: the block's call sites; the first is the probed one.
        probe: the probe of the first site.
        pictured: the arguments that have the picture's tokens.
        attentions: the block's attention calls, in order.
        queries: for each attention, the arguments whose tokens make up its queries, in order; empty if unknown.
        attended: the number of tokens that take part in attention, by text argument, where the end of the text does not.
        parts: the number of parts of a frame for which the block gets separate input; 0 if there are none.

    Raises:
        Undescribed: a declaration cannot express something that the block does.
    """

    def __init__(self, sites: Sequence[CallSite]) -> None:
        self.sites = sites
        self.probe = Probe(sites[0].run)
        self.path = sites[0].run.path
        self.attentions: list[d.Attention] = []
        self.queries: list[tuple[str, ...]] = []
        self.attended: dict[str, int] = {}
        self.parts = 0
        self._dims: dict[str, tuple[int, ...]] = {}
        self._follows: dict[str, Followed] = {}
        site = sites[0]
        for name, value in site.run.values.items():
            if unseen := unreadable(value):
                raise Undescribed(f"{self.path} is given an object of the class {unseen} as {name}")
            tokens_by_number = [site.tokens.get((name, number)) for number in range(len(tensors_in(value)))]
            tokens = next(filter(None, tokens_by_number), None)
            if tokens is not None and not isinstance(value, Tensor):
                raise Undescribed(f"{self.path} is given the picture's tokens in a {type(value).__name__} as {name}")
            if tokens is not None:
                self._note(name, tuple(range(tokens.dim, tokens.dim + (len(tokens.step) if tokens.grid else 1))))
        self.pictured = tuple(self._dims)
        other_names = [
            name for name, value in site.run.values.items() if name not in self._dims and _may_be_tokens(value)
        ]
        for name in sorted(other_names, key=lambda name: (name, 0) not in site.text):
            self._note(name, (1,))
        for number in range(len(self.probe.attentions)):
            self._attention(number)

    def length(self, name: str, site: CallSite | None = None) -> int:
        """Return the number of tokens of a stream, at one of the sizes."""
        value = (site or self.sites[0]).run.values[name]
        return math.prod(value.shape[dim] for dim in self._dims[name])

    def tokens_of_a_frame(self, name: str, site: CallSite | None = None) -> int:
        """Return the number of the picture's tokens per frame in a stream, at one of the sizes."""
        site = site or self.sites[0]
        tokens = site.tokens[name, 0]
        return tokens.count // max(1, site.frames // tokens.step[0])

    @cached_property
    def streams(self) -> tuple[str, ...]:
        """Return the arguments that are streams: the picture's tokens, and text that these attend to or the block returns."""
        divided = {
            name for each in self.attentions if isinstance(each, d.DistributedAttention) for name in each.streams
        }
        carried = {name for name in self._dims if name in self.pictured or name in divided or self._is_carried(name)}
        return tuple(name for name in self.sites[0].run.values if name in carried)

    @cached_property
    def returns(self) -> tuple[str, ...]:
        """Return, for each returned value, the stream whose tokens the value has.

        Raises:
            Undescribed: a value has the tokens of no stream, or is not a tensor.
        """
        returned = self.sites[0].run.returned
        values = list(returned) if isinstance(returned, (tuple, list)) else [returned]
        if not all(value is None or isinstance(value, Tensor) for value in values):
            raise Undescribed(f"{self.path} returns something besides tensors")
        streams: list[str] = []
        numbers = iter(range(len(values)))
        for value in values:
            if value is None:
                streams.append("")
                continue
            number = next(numbers)
            fits = [name for name in self.streams if is_run(self._follows[name].returned[number], self.length(name))]
            if not fits:
                raise Undescribed(
                    f"value {len(streams) + 1} that {self.path} returns has other tokens than its arguments"
                )
            streams.append(next((name for name in fits if name not in streams), fits[0]))
        remaining = iter([name for name in self.streams if name not in streams])
        return tuple(name or next(remaining, self.streams[0]) for name in streams)

    @cached_property
    def attends_in(self) -> str:
        """Return the module that calls attention without options; empty if none does. Raises Undescribed if there are several."""
        within = {each.attends_in for each in self.probe.attentions}
        if len(within) > 1:
            raise Undescribed(f"{self.path} calls attention in several ways ({', '.join(sorted(within))})")
        return "".join(within)

    @cached_property
    def heads(self) -> tuple[int, int] | None:
        """Return the number of heads and the head width of the first distributed attention."""
        for attention, call in zip(self.attentions, self.probe.attentions, strict=True):
            if isinstance(attention, d.DistributedAttention):
                return call.operands.q.shape[1], call.operands.q.shape[3]
        return None

    def kinds(self, name: str) -> Iterator[d.StreamKind]:
        """Yield the stream kinds that fit a stream, the likeliest first.

        Raises:
            Undescribed: the position of the picture's tokens in the stream changes with the latent's size.
        """
        if name not in self.pictured:
            yield d.FirstPatchTokens()
            return
        seen = [site.tokens.get((name, 0)) for site in self.sites]
        tokens = [each for each in seen if each is not None]
        first = tokens[0]
        if len(tokens) < len(seen) or any((each.dim, each.step) != (first.dim, first.step) for each in tokens):
            raise Undescribed(
                f"the position of the picture's tokens in {name} of {self.path} changes with the latent's size"
            )
        placed = d.LatentTokens(grid=first.grid, dim=first.dim)
        for rule in starts([(each.length, each.count, each.start) for each in tokens]):
            if rule == placed.start:
                yield from (
                    replace(placed, start=AlignedToEnd(), trailing=each) for each in self._trailing_latents(tokens)
                )
            yield replace(placed, start=rule)

    def _trailing_latents(self, tokens: Sequence[Tokens]) -> Iterator[TokensOfLatents]:
        """Yield the latents whose tokens follow the picture's tokens at all sizes."""
        latents, first = self.sites[0].latents, tokens[0]
        for count in range(1, len(latents) + 1):
            for names in itertools.combinations(latents, count):
                token_counts = [
                    sum(Picture(shape, each.step).tokens for name in names for shape in site.latents[name])
                    for site, each in zip(self.sites, tokens, strict=True)
                ]
                if token_counts == [each.length - each.start - each.count for each in tokens]:
                    yield TokensOfLatents(names, first.step)

    def _note(self, name: str, dims: tuple[int, ...]) -> None:
        """Probe a tensor that may be tokens."""
        self._dims[name] = dims
        self._follows[name] = self.probe.follow(name, 0, dims)

    def _laid(self, followed: Mapping[str, Tensor]) -> tuple[str, ...]:
        """Return the arguments whose tokens make up an operand, in order; empty if their tokens do not fill it.

        Args:
            followed: for each argument, the token that each position of the operand follows.
        """
        order: list[str] = []
        at, length = 0, next(iter(followed.values())).numel() if followed else 0
        while at < length:
            fits = (name for name, positions in followed.items() if self._is_run_at(name, positions, at))
            name = next(fits, None)
            if name is None or name in order:
                return ()
            order.append(name)
            at += self.length(name)
        return tuple(order)

    def _is_run_at(self, name: str, positions: Tensor, at: int) -> bool:
        """Return True if an argument's tokens begin at `at`. At the operand's end, the first tokens of a text suffice."""
        run, length = positions[at : at + self.length(name)], self.length(name)
        return is_run(run, run.numel() if name not in self.pictured and run.numel() else length)

    def _attention(self, number: int) -> None:
        """Determine the kind of an attention and the streams of its queries."""
        operands = self.probe.attentions[number].operands
        keys = self._laid({name: each.v[number] for name, each in self._follows.items()})
        queries = {name: each.q[number] for name, each in self._follows.items()}
        at, same_tokens = 0, operands.q.shape[2] == operands.k.shape[2] and bool(keys)
        for name in keys:
            same_tokens, at = same_tokens and self._is_run_at(name, queries[name], at), at + self.length(name)
        if same_tokens:
            if at > operands.k.shape[2]:
                self.attended[keys[-1]] = self.length(keys[-1]) - (at - operands.k.shape[2])
            self.attentions.append(
                d.DistributedAttention(keys, kv_heads=shared_heads(operands.q, operands.k, operands.v))
            )
            self.queries.append(keys)
            return
        reached = [
            positions
            for name in self.pictured
            for positions in (self._follows[name].k[number], self._follows[name].v[number])
        ]
        if any(bool((positions != NOTHING).any()) for positions in reached):
            raise Undescribed(
                f"attention {number + 1} of {self.path} has keys of the picture in another layout than its queries"
            )
        self.attentions.append(d.ReplicatedKeys())
        self.queries.append(self._laid(queries))

    def _is_carried(self, name: str) -> bool:
        """Return True if the block returns the text token by token."""
        returned = self._follows[name].returned
        return (name, 0) in self.sites[0].text and any(is_run(positions, self.length(name)) for positions in returned)


def _may_be_tokens(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 3 and value.is_floating_point() and value.shape[1] > 1
